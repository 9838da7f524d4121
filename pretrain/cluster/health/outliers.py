"""Statistics of the health check: find the outliers among measurements, and the host that causes them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median_high, median_low


def upper_median(values: Sequence[float]) -> float:
    """Return the median; for an even count, the higher of the two middle values.

    With the mean of the two, the slower one of two hosts would hardly ever be an outlier.
    """
    return median_high(values)


def slow_indices(values: Sequence[float], min_ratio: float) -> list[int]:
    """Return the indices of the values below `min_ratio` times the upper median."""
    return [i for i, value in enumerate(values) if value < min_ratio * upper_median(values)] if values else []


def typical_rate(links: dict[tuple[str, str], float]) -> float:
    """Estimate the rate of a healthy link: the median, over all hosts, of the rate of the host's fastest link.

    A slow host slows down one link of every other host. With three hosts or more, the fastest link of a healthy host is
    therefore a link to another healthy host.
    """
    hosts = {host for pair in links for host in pair}
    return upper_median([max(value for pair, value in links.items() if host in pair) for host in hosts])


def typical_latency(links: dict[tuple[str, str], float]) -> float:
    """Estimate the latency of a healthy link: the median, over all hosts, of the host's lowest latency."""
    hosts = {host for pair in links for host in pair}
    return median_low([min(value for pair, value in links.items() if host in pair) for host in hosts])


def faulty_hosts(bad_pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Attribute each bad pair to one of its hosts. Returns (host, its partners in bad pairs), the worst host first.

    If a pair shares no host with another remaining bad pair, either host may be the cause: it is returned as
    ("a and b", []).
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
    """Return the difference of each clock from the median clock, in seconds.

    With only two clocks, the first clock is the reference.
    """
    typical = sorted(offsets_s)[len(offsets_s) // 2] if len(offsets_s) > 2 else offsets_s[0]
    return [offset - typical for offset in offsets_s]
