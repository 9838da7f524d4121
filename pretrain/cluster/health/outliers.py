"""Which of many measurements stand out, and which host is to blame. Pure functions of numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low

LATENCY_NOISE_US = 100.0  # a difference that no training step feels


@dataclass(frozen=True)
class Measure:
    """One number that hosts are compared by; more is better."""

    name: str
    unit: str
    min_ratio: float  # what is less than this share of the median stands out


PRODUCTS = Measure("matrix products", "TFLOP/s", 0.8)
FREE_MEMORY = Measure("free memory", "GiB", 0.8)
MEMORY = Measure("memory", "GB/s", 0.7)
INSIDE = Measure("all-reduce inside the host", "GB/s", 0.7)
NETWORK = Measure("network", "Gbit/s", 0.6)
DISK = Measure("disk", "MB/s", 0.4)
LATENCY = Measure("latency", "us", 0.25)  # here less is better: what is more than 4 medians stands out
MEASURES = (PRODUCTS, FREE_MEMORY, MEMORY, INSIDE, NETWORK, LATENCY, DISK)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a host, or with what is between two."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def reference(values: Sequence[float]) -> float:
    """The median; of an even number the better one in the middle, so that one of two hosts can stand out."""
    return median_high(values)


def slow(values: Sequence[float], min_ratio: float) -> list[int]:
    """Indices of the values below `min_ratio` of the median."""
    return [i for i, value in enumerate(values) if value < min_ratio * reference(values)] if values else []


def usual_link(links: dict[tuple[str, str], float]) -> float:
    """What a link should carry: the median over hosts of each host's best link. A bad host spoils a link of everyone,
    but the best one of nobody but itself.
    """
    hosts = {host for pair in links for host in pair}
    return reference([max(value for pair, value in links.items() if host in pair) for host in hosts])


def usual_latency(links: dict[tuple[str, str], float]) -> float:
    """The same for latencies: the median over hosts of each host's lowest."""
    hosts = {host for pair in links for host in pair}
    return median_low([min(value for pair, value in links.items() if host in pair) for host in hosts])


def culprits(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(host, the partners that it failed with), the worst first, so that every bad pair is told once.

    A pair that shares no host with another bad one is told as `a and b`: which of them is to blame is unknown.
    """
    left, found = sorted(set(pairs)), []
    while left:
        counts = Counter(host for pair in left for host in pair)
        worst, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        partners = [a if b == worst else b for a, b in left if worst in (a, b)]
        found.append((worst, partners) if count > 1 else (" and ".join(sorted((worst, partners[0]))), []))
        left = [pair for pair in left if worst not in pair]
    return found


def skews(offsets_s: Sequence[float]) -> list[float]:
    """Clocks against their median, in seconds; of two, against the first."""
    usual = sorted(offsets_s)[len(offsets_s) // 2] if len(offsets_s) > 2 else offsets_s[0]
    return [offset - usual for offset in offsets_s]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
