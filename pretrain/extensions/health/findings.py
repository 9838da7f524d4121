"""Turn the measurements of all ranks into values and findings of the report. This code runs on rank 0 only."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median, median_high, median_low

from pretrain.errors import format_number
from pretrain.extensions.health.devices import DeviceHealth, DiskHealth
from pretrain.extensions.health.network import Collective, ConnectionResult, Link
from pretrain.extensions.health.report import (
    DISK,
    FREE_MEMORY,
    INSIDE,
    LATENCY,
    LATENCY_NOISE_US,
    MEMORY,
    NETWORK,
    PRODUCTS,
    ClusterReport,
    LinkRow,
    Measure,
)

HostRanks = dict[str, list[int]]  # host -> its ranks
HostPair = tuple[str, str]


def report_connections(report: ClusterReport, hosts: HostRanks, max_skew_s: float,
                       results: Sequence[dict[str, ConnectionResult]]) -> None:
    """Report hosts that cannot connect, and clocks that differ. `results`: by rank, other host -> result."""
    by_host = {host: results[ranks[0]] for host, ranks in hosts.items()}
    errors = {(host, other): result.error for host, row in by_host.items() for other, result in row.items()
              if result.error}
    for causes, pairs in faulty_hosts({(min(pair), max(pair)) for pair in errors}):
        other, cause = sorted(pairs[0], key=lambda host: host == causes[0])
        reason = errors.get((other, cause)) or errors[cause, other]
        report.add(" and ".join(causes), f"no TCP connection with {_partners(causes, pairs)} ({reason}); every host "
                                         "must be able to connect to every other host on any port")
    report.unreachable = bool(errors)
    master = next(iter(hosts))
    offsets = {host: -row[master].clock_offset_s if host != master else 0.0 for host, row in by_host.items()
               if host == master or not row[master].error}
    for host, skew in zip(offsets, clock_skews(list(offsets.values())), strict=True):
        report.clocks_ms[host] = skew * 1e3
        if abs(skew) > max_skew_s:
            report.outliers.add((host, "clock"))
            direction = "ahead of" if skew > 0 else "behind"
            report.add(host, f"its clock is {format_number(abs(skew))} s {direction} the other hosts; at most "
                             f"{max_skew_s:g} s are allowed")


def report_devices(report: ClusterReport, hosts: HostRanks, min_ratio: float | None,
                   results: Sequence[DeviceHealth]) -> None:
    """Report wrong results, and devices that are slower or have less free memory than the others."""
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    for rank, health in enumerate(results):
        for problem in health.problems:
            report.add(host_of[rank], f"rank {rank}: {problem}")
    for measure, values in ((PRODUCTS, [health.product_tflops for health in results]),
                            (MEMORY, [health.memory_gb_per_s for health in results]),
                            (FREE_MEMORY, [health.free_memory_bytes / 2**30 for health in results])):
        _compare(report, measure, min_ratio, [(host_of[rank], f"rank {rank}: ", value)
                                              for rank, value in enumerate(values)])


def report_disks(report: ClusterReport, hosts: HostRanks, min_ratio: float | None,
                 results: Sequence[DiskHealth | None]) -> None:
    """Report disks that fail, have too little free space, or are slower than the others."""
    disks = {host: health for host, ranks in hosts.items() if (health := results[ranks[0]]) is not None}
    for host, health in disks.items():
        report.free_disk_gb[host] = health.free_bytes / 1e9
        for problem in health.problems:
            report.outliers.add((host, "free disk" if health.write_mb_per_s else DISK.name))
            report.add(host, problem)
    _compare(report, DISK, min_ratio, [(host, "", health.write_mb_per_s) for host, health in disks.items()
                                       if health.write_mb_per_s])


def report_collectives(report: ClusterReport, hosts: HostRanks, min_ratio: float | None,
                       results: Sequence[dict[str, Collective]]) -> None:
    """Report wrong results, and hosts on which the all-reduce among their own ranks is slow."""
    for host, ranks in hosts.items():
        for rank in ranks:
            for name, each in results[rank].items():
                if each.wrong:
                    report.add(host, f"rank {rank}: wrong result of {name}")
    for name, each in results[0].items():
        if name != "inside":
            report.collectives[name] = {"gb_per_s": each.gb_per_s, "latency_us": each.latency_us}
    inside = [(host, "", min(results[rank]["inside"].gb_per_s for rank in ranks)) for host, ranks in hosts.items()
              if len(ranks) > 1 and "inside" in results[ranks[0]]]
    _compare(report, INSIDE, min_ratio, inside)


def report_links(report: ClusterReport, results: dict[HostPair, list[Link]], min_ratio: float | None,
                 min_gbit_per_s: float) -> None:
    """Report corrupted transfers, and pairs of hosts that are slower than the others or slower than required.

    If slow pairs have a host in common, the finding names this host.
    """
    if not results:
        return
    for pair, links in results.items():
        if any(link.corrupted for link in links):
            report.add(" and ".join(pair), "data was corrupted in transfers between these hosts")
    rates = {pair: _gbit_per_s(links) for pair, links in results.items()}
    latencies = {pair: max(link.latency_us for link in links) for pair, links in results.items()}
    min_rate = max((min_ratio or NETWORK.min_ratio) * typical_rate(rates), min_gbit_per_s)
    slow_pairs = {pair for pair, rate in rates.items() if rate < min_rate}
    typical = typical_latency(latencies)
    max_latency = max(typical / (min_ratio or LATENCY.min_ratio), typical + LATENCY_NOISE_US)
    late_pairs = {pair for pair, latency in latencies.items() if latency > max_latency}
    _report_pairs(report, NETWORK, rates, slow_pairs, f"expected at least {format_number(min_rate)} Gbit/s")
    _report_pairs(report, LATENCY, latencies, late_pairs, f"expected at most {format_number(max_latency)} us")
    report.links = [LinkRow(pair, rates[pair], latencies[pair], pair in slow_pairs | late_pairs) for pair in results]


def _report_pairs(report: ClusterReport, measure: Measure, values: dict[HostPair, float], bad: set[HostPair],
                  expected: str) -> None:
    """Set each host's value to the median of its links, and report the bad pairs. `expected`: end of the finding."""
    for host in report.hosts:
        of_host = [value for pair, value in values.items() if host in pair]
        if of_host:
            report.hosts[host][measure.name] = median(of_host)
    for causes, pairs in faulty_hosts(bad):
        value = format_number(median(values[pair] for pair in pairs))
        text = f"{measure.name} of {value} {measure.unit} with {_partners(causes, pairs)}; {expected}"
        if len(causes) == 1:
            report.add_outlier(causes[0], measure, text)
        else:
            report.add(" and ".join(causes), text)


def _partners(causes: tuple[str, ...], pairs: list[HostPair]) -> str:
    """Return the partners of a host in its bad pairs, as text; for two possible causes "each other"."""
    return ", ".join(host for pair in pairs for host in pair if host not in causes) or "each other"


def _gbit_per_s(links: list[Link]) -> float:
    """Return the rate between two hosts, over all pairs of ranks together. The slowest pair determines the time.

    Two factors of 2 cancel out: `links` has each transfer twice, once from each end, and `seconds` is the time to send
    `num_bytes` in one direction and then in the other.
    """
    return sum(link.num_bytes for link in links) * 8 / max(link.seconds for link in links) / 1e9


def _compare(report: ClusterReport, measure: Measure, min_ratio: float | None,
             values: list[tuple[str, str, float]]) -> None:
    """Set each host's value to the lowest of its values, and report outliers.

    `values`: (host, prefix of the finding's text, value).
    """
    ratio = min_ratio or measure.min_ratio
    numbers = [value for *_, value in values]
    for host, _, value in values:
        row = report.hosts[host]
        row[measure.name] = min(value, row.get(measure.name, value))
    for i in slow_indices(numbers, ratio):
        host, prefix, value = values[i]
        text = f"{prefix}{measure.name} of {format_number(value)} {measure.unit}; the median is " \
               f"{format_number(upper_median(numbers))}, expected at least {ratio:.0%} of it"
        report.add_outlier(host, measure, text)


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


def faulty_hosts(bad_pairs: Iterable[HostPair]) -> list[tuple[tuple[str, ...], list[HostPair]]]:
    """Attribute each bad pair to one of its hosts. Returns ((host,), its bad pairs), the worst host first.

    If a pair shares no host with another remaining bad pair, either host may be the cause: it is returned as
    (pair, [pair]).
    """
    remaining, found = sorted(set(bad_pairs)), list[tuple[tuple[str, ...], list[HostPair]]]()
    while remaining:
        counts = Counter(host for pair in remaining for host in pair)
        worst, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        pairs = [pair for pair in remaining if worst in pair]
        found.append(((worst,) if count > 1 else pairs[0], pairs))
        remaining = [pair for pair in remaining if worst not in pair]
    return found


def clock_skews(offsets_s: Sequence[float]) -> list[float]:
    """Return the difference of each clock from the median clock, in seconds.

    With only two clocks, the first clock is the reference.
    """
    typical = sorted(offsets_s)[len(offsets_s) // 2] if len(offsets_s) > 2 else offsets_s[0]
    return [offset - typical for offset in offsets_s]
