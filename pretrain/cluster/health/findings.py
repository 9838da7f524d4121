"""Turns measurements of all ranks into a report's numbers and findings. Runs on rank 0."""

from collections.abc import Sequence
from statistics import median

from pretrain.cluster.health.connections import Reach
from pretrain.cluster.health.devices import DeviceHealth, DiskHealth
from pretrain.cluster.health.links import Collective, Link
from pretrain.cluster.health.outliers import (
    DISK,
    FREE_MEMORY,
    INSIDE,
    LATENCY,
    LATENCY_NOISE_US,
    MEMORY,
    NETWORK,
    PRODUCTS,
    Measure,
    culprits,
    number,
    reference,
    skews,
    slow,
    usual_latency,
    usual_link,
)
from pretrain.cluster.health.report import LinkRow, Report

Hosts = dict[str, list[int]]  # ranks of each
Pair = tuple[str, str]


def judge_reach(report: Report, hosts: Hosts, max_skew_s: float, found: Sequence[dict[str, Reach]]) -> None:
    """Hosts that others cannot connect to, and clocks that differ."""
    firsts = {host: found[ranks[0]] for host, ranks in hosts.items()}
    errors = {(host, other): seen.error for host, row in firsts.items() for other, seen in row.items() if seen.error}
    for host, partners in culprits({(min(pair), max(pair)) for pair in errors}):
        sides = host.split(" and ") if not partners else [host, partners[0]]
        why = errors.get((sides[1], sides[0])) or errors[sides[0], sides[1]]
        report.add(host, f"no TCP connection with {', '.join(partners) or 'each other'} ({why}); expected one from "
                         "every host to every other on any port")
    report.unreachable = bool(errors)
    master = next(iter(hosts))
    offsets = {host: -row[master].clock_offset_s if host != master else 0.0 for host, row in firsts.items()
               if host == master or not row[master].error}
    for host, skew in zip(offsets, skews(list(offsets.values())), strict=True):
        report.clocks_ms[host] = skew * 1e3
        if abs(skew) > max_skew_s:
            report.outliers.add((host, "clock"))
            report.add(host, f"its clock is {number(abs(skew))} s {'ahead of' if skew > 0 else 'behind'} the others'; "
                             f"expected at most {max_skew_s:g} s")


def judge_devices(report: Report, hosts: Hosts, min_ratio: float | None, found: Sequence[DeviceHealth]) -> None:
    """Wrong results, and devices that are slower or fuller than the others."""
    by_rank = {rank: host for host, ranks in hosts.items() for rank in ranks}
    for rank, health in enumerate(found):
        for complaint in health.complaints:
            report.add(by_rank[rank], f"rank {rank}: {complaint}")
    for measure, values in ((PRODUCTS, [health.product_tflops for health in found]),
                            (MEMORY, [health.memory_gb_per_s for health in found]),
                            (FREE_MEMORY, [health.free_memory_bytes / 2**30 for health in found])):
        _compare(report, measure, min_ratio, [(by_rank[rank], f"rank {rank}: ", value)
                                              for rank, value in enumerate(values)])


def judge_disks(report: Report, hosts: Hosts, min_ratio: float | None, found: Sequence[DiskHealth | None]) -> None:
    """Disks that fail, are full, or slower than the others."""
    disks = {host: health for host, ranks in hosts.items() if (health := found[ranks[0]]) is not None}
    for host, health in disks.items():
        report.free_disk_gb[host] = health.free_bytes / 1e9
        for complaint in health.complaints:
            report.outliers.add((host, "free disk" if health.write_mb_per_s else DISK.name))
            report.add(host, complaint)
    _compare(report, DISK, min_ratio, [(host, "", health.write_mb_per_s) for host, health in disks.items()
                                       if health.write_mb_per_s])


def judge_collectives(report: Report, hosts: Hosts, min_ratio: float | None,
                      found: Sequence[dict[str, Collective]]) -> None:
    """Wrong sums, and hosts whose own ranks are slow among themselves."""
    for host, ranks in hosts.items():
        for rank in ranks:
            for name, each in found[rank].items():
                if each.wrong:
                    report.add(host, f"rank {rank}: wrong result of {name}")
    for name, each in found[0].items():
        if name != "inside":
            report.collectives[name] = {"gb_per_s": each.gb_per_s, "latency_us": each.latency_us}
    inside = [(host, "", min(found[rank]["inside"].gb_per_s for rank in ranks)) for host, ranks in hosts.items()
              if len(ranks) > 1 and "inside" in found[ranks[0]]]
    _compare(report, INSIDE, min_ratio, inside)


def judge_links(report: Report, found: dict[Pair, list[Link]], min_ratio: float | None, min_gbit_per_s: float) -> None:
    """Pairs of hosts that are slower than others, or than they must be; the host that they have in common."""
    if not found:
        return
    for pair, links in found.items():
        if any(link.changed for link in links):
            report.add(" and ".join(pair), "bytes changed on the way between them")
    rates = {pair: _gbit_per_s(links) for pair, links in found.items()}
    latencies = {pair: max(link.latency_us for link in links) for pair, links in found.items()}
    least = max((min_ratio or NETWORK.min_ratio) * usual_link(rates), min_gbit_per_s)
    slow_pairs = {pair for pair, rate in rates.items() if rate < least}
    usual = usual_latency(latencies)
    most = max(usual / (min_ratio or LATENCY.min_ratio), usual + LATENCY_NOISE_US)
    late_pairs = {pair for pair, latency in latencies.items() if latency > most}
    _blame(report, NETWORK, rates, slow_pairs, f"expected at least {number(least)} Gbit/s")
    _blame(report, LATENCY, latencies, late_pairs, f"expected at most {number(most)} us")
    report.links = [LinkRow(pair, rates[pair], latencies[pair], pair in slow_pairs | late_pairs) for pair in found]


def _blame(report: Report, measure: Measure, values: dict[Pair, float], bad: set[Pair], expected: str) -> None:
    """Each host's number is the median of its links."""
    for host in report.hosts:
        mine = [value for pair, value in values.items() if host in pair]
        if mine:
            report.hosts[host][measure.name] = median(mine)
    for host, partners in culprits(bad):
        pairs = [pair for pair in bad if host in pair] if partners else [_pair_of(host, bad)]
        seen = number(median(values[pair] for pair in pairs))
        text = f"{measure.name} of {seen} {measure.unit} with {', '.join(partners) or 'each other'}; {expected}"
        if partners:
            report.outlier(host, measure, text)
        else:
            report.add(host, text)


def _pair_of(told: str, pairs: set[Pair]) -> Pair:
    return next(pair for pair in pairs if " and ".join(sorted(pair)) == told)


def _gbit_per_s(links: list[Link]) -> float:
    """Of all ranks of both hosts together; the slowest one decides when they are done.

    Both ends report each transfer, and it goes there and back: the two factors of 2 cancel out.
    """
    return sum(link.num_bytes for link in links) * 8 / max(link.seconds for link in links) / 1e9


def _compare(report: Report, measure: Measure, min_ratio: float | None,
             values: list[tuple[str, str, float]]) -> None:
    """(host, which of its devices, value): keep each host's worst, and tell those that stand out."""
    ratio = min_ratio or measure.min_ratio
    numbers = [value for *_, value in values]
    for host, _, value in values:
        row = report.hosts[host]
        row[measure.name] = min(value, row.get(measure.name, value))
    for i in slow(numbers, ratio):
        host, which, value = values[i]
        report.outlier(host, measure, f"{which}{measure.name} of {number(value)} {measure.unit}; the median is "
                       f"{number(reference(numbers))}, expected at least {ratio:.0%} of it")
