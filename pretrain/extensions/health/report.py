"""Settings, measured quantities and report of the cluster health check. Imports neither torch nor DeepSpeed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import format_number

LATENCY_NOISE_US = 100.0  # latencies that differ by less are not reported: they do not slow down a training step


@dataclass(frozen=True)
class ClusterCheckSettings:
    """Sizes, limits and thresholds of the check. For sizes, None means the default of the device."""

    folder: Path = Path(".")  # folder whose disk is measured
    run: RunArguments | None = None  # run to validate; its checkpoint must fit on the disk
    product_size: int | None = None  # rows and columns of the multiplied matrices
    memory_bytes: int | None = None  # memory that is filled on each device
    message_bytes: int | None = None  # size of a transfer
    disk_bytes: int = 2**28  # bytes that each host writes
    rounds: int = 32  # rounds of host pairs that are measured; 0: all rounds, so every pair
    timeout_s: float = 60.0  # time-out of each measurement; ranks may start within twice this time
    min_ratio: float | None = None  # replaces the min_ratio of every measure; None: keep them
    min_gbit_per_s: float = 0.0  # rate that every link must reach; 0: no requirement
    max_clock_skew_s: float = 1.0  # largest allowed difference of a clock from the median clock


@dataclass(frozen=True)
class Measure:
    """A quantity that is measured on every host, and compared. Higher values are better, except for LATENCY."""

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


@dataclass(frozen=True)
class Finding:
    """A problem of a host, or of the link between two hosts."""

    where: str  # host, "host and host", or "rank N" if the host is unknown
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True)
class LinkRow:
    """Measurement of the link between two hosts, with all their ranks at once."""

    hosts: tuple[str, str]
    gbit_per_s: float
    latency_us: float
    bad: bool  # whether the rate or the latency is an outlier


@dataclass
class ClusterReport:
    """Results of the check. Rank 0 fills in this object while the check runs."""

    ranks: int
    hosts: dict[str, dict[str, float]] = field(default_factory=dict)  # host -> name of the measure -> value
    outliers: set[tuple[str, str]] = field(default_factory=set)  # (host, name of the measure)
    clocks_ms: dict[str, float] = field(default_factory=dict)  # host -> its clock minus the median clock
    free_disk_gb: dict[str, float] = field(default_factory=dict)  # host -> free GB on the checkpoint's disk
    collectives: dict[str, dict[str, float]] = field(default_factory=dict)  # name -> gb_per_s (of the bus), latency_us
    links: list[LinkRow] = field(default_factory=list)
    rounds: tuple[int, int] = (0, 0)  # rounds of host pairs: (measured, all)
    findings: list[Finding] = field(default_factory=list)
    unreachable: bool = False  # some host cannot connect to another host
    skipped: str = ""  # sentence that says what was not measured, and why

    def add(self, where: str, text: str) -> None:
        """Add a finding, unless the report already has the same one."""
        if Finding(where, text) not in self.findings:
            self.findings.append(Finding(where, text))

    def add_outlier(self, host: str, measure: Measure, text: str) -> None:
        """Add a finding about a value of the table, and mark this value as an outlier in the table."""
        self.outliers.add((host, measure.name))
        self.add(host, text)

    def to_json(self) -> str:
        """Return the report as a JSON object. The units are in the names of the keys, or in MEASURES."""
        record: dict[str, Any] = {"ok": not self.findings, **asdict(self)}
        record["outliers"] = sorted(self.outliers)
        record["findings"] = [asdict(finding) for finding in self.findings]
        return json.dumps(record, indent=1)


def report_table(report: ClusterReport) -> Table:
    """Return a table with one row per host. Outliers are marked with `<<`."""
    measured = [each for each in MEASURES if any(each.name in values for values in report.hosts.values())]
    titles = [f"{each.name.removesuffix(' inside the host')} {each.unit}" for each in measured]
    table = Table("host", *titles, "clock ms", "free disk GB", box=None, pad_edge=False, header_style="")
    for host, values in report.hosts.items():
        cells = [_cell(values.get(each.name), (host, each.name) in report.outliers) for each in measured]
        others = [_cell(column.get(host), (host, name) in report.outliers)
                  for name, column in (("clock", report.clocks_ms), ("free disk", report.free_disk_gb))]
        table.add_row(host, *cells, *others)
    return table


def report_lines(report: ClusterReport) -> list[str]:
    """Return the lines below the table: collectives, bad links, notes and findings."""
    found = [f"{name} of all {report.ranks} ranks: {format_number(each['gb_per_s'])} GB/s bus bandwidth, "
             f"{format_number(each['latency_us'])} {LATENCY.unit} latency"
             for name, each in report.collectives.items()]
    if report.links:
        rates = sorted(link.gbit_per_s for link in report.links)
        found.append(f"{len(rates)} pairs of hosts: {format_number(rates[0])} to {format_number(rates[-1])} Gbit/s")
    found += [f"{' - '.join(link.hosts)}: {format_number(link.gbit_per_s)} Gbit/s, "
              f"{format_number(link.latency_us)} us <<" for link in report.links if link.bad]
    if report.rounds[0] < report.rounds[1]:
        found.append(f"note: each host was measured with {report.rounds[0]} of {report.rounds[1]} other hosts; "
                     "--rounds 0 measures all")
    found += [f"note: {report.skipped}"] if report.skipped else []
    return found + [f"BAD  {finding}" for finding in report.findings]


def _cell(value: float | None, is_outlier: bool) -> str:
    return ("-" if value is None else format_number(value)) + (" <<" if is_outlier else "")
