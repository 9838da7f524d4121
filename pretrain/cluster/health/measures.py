"""Measures by which hosts are compared, and their thresholds."""

from dataclasses import dataclass

LATENCY_NOISE_US = 100.0  # smaller differences do not slow a training step


@dataclass(frozen=True)
class Measure:
    """One measured quantity. More is better, except for LATENCY."""

    name: str
    unit: str
    min_ratio: float  # a value below this fraction of the median is an outlier


PRODUCTS = Measure("matrix products", "TFLOP/s", 0.8)
FREE_MEMORY = Measure("free memory", "GiB", 0.8)
MEMORY = Measure("memory", "GB/s", 0.7)
INSIDE = Measure("all-reduce inside the host", "GB/s", 0.7)
NETWORK = Measure("network", "Gbit/s", 0.6)
DISK = Measure("disk", "MB/s", 0.4)
LATENCY = Measure("latency", "us", 0.25)  # less is better: a value above 4 times the median is an outlier
MEASURES = (PRODUCTS, FREE_MEMORY, MEMORY, INSIDE, NETWORK, LATENCY, DISK)


def format_number(value: float) -> str:
    """Format with three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
