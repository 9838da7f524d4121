"""Statistics of the health check: which measurements are outliers, and which host causes them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median_high, median_low


def reference(values: Sequence[float]) -> float:
    """Return the median. For an even count, the higher middle value, so that one of two hosts can be an outlier."""
    return median_high(values)


def slow(values: Sequence[float], min_ratio: float) -> list[int]:
    """Return the indices of the values below `min_ratio` times the median."""
    return [i for i, value in enumerate(values) if value < min_ratio * reference(values)] if values else []


def typical_rate(links: dict[tuple[str, str], float]) -> float:
    """Return the rate that a healthy link has: the median over hosts of each host's best link.

    A slow host slows down one link of every other host, but not the best link of any other host.
    """
    hosts = {host for pair in links for host in pair}
    return reference([max(value for pair, value in links.items() if host in pair) for host in hosts])


def typical_latency(links: dict[tuple[str, str], float]) -> float:
    """Return the latency that a healthy link has: the median over hosts of each host's lowest latency."""
    hosts = {host for pair in links for host in pair}
    return median_low([min(value for pair, value in links.items() if host in pair) for host in hosts])


def faulty_hosts(bad_pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Attribute each bad pair of hosts to one host. Returns (host, its partners in bad pairs), the worst host first.

    A pair that shares no host with another bad pair is returned as ("a and b", []): the cause may be either host.
    """
    remaining, found = sorted(set(bad_pairs)), []
    while remaining:
        counts = Counter(host for pair in remaining for host in pair)
        worst, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        partners = [a if b == worst else b for a, b in remaining if worst in (a, b)]
        found.append((worst, partners) if count > 1 else (" and ".join(sorted((worst, partners[0]))), []))
        remaining = [pair for pair in remaining if worst not in pair]
    return found


def clock_skews(offsets_s: Sequence[float]) -> list[float]:
    """Return the difference of each clock from the median clock, in seconds. Of two clocks, from the first."""
    typical = sorted(offsets_s)[len(offsets_s) // 2] if len(offsets_s) > 2 else offsets_s[0]
    return [offset - typical for offset in offsets_s]
