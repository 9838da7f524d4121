"""Quantities that are measured on every host and compared between hosts, with the thresholds for outliers."""

from dataclasses import dataclass

LATENCY_NOISE_US = 100.0  # latencies that differ by less are not reported: they do not slow down a training step


@dataclass(frozen=True)
class Measure:
    """One measured quantity. Higher values are better, except for LATENCY."""

    name: str
    unit: str
    min_ratio: float  # a value below this fraction of the median is an outlier


PRODUCTS = Measure("matrix products", "TFLOP/s", 0.8)
FREE_MEMORY = Measure("free memory", "GiB", 0.8)
MEMORY = Measure("memory", "GB/s", 0.7)
INSIDE = Measure("all-reduce inside the host", "GB/s", 0.7)
NETWORK = Measure("network", "Gbit/s", 0.6)
DISK = Measure("disk", "MB/s", 0.4)
LATENCY = Measure("latency", "us", 0.25)  # lower is better: a value above the median / 0.25 is an outlier
MEASURES = (PRODUCTS, FREE_MEMORY, MEMORY, INSIDE, NETWORK, LATENCY, DISK)


def format_number(value: float) -> str:
    """Format a number with three significant digits. Numbers above 100 keep all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
