"""What a check of the cluster found: numbers by host, findings, and how both are shown."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from pretrain.cluster.health.outliers import LATENCY, MEASURES, Finding, Measure, number


@dataclass(frozen=True)
class LinkRow:
    """Between two hosts, all their ranks at once."""

    hosts: tuple[str, str]
    gbit_per_s: float
    latency_us: float
    bad: bool


@dataclass
class Report:
    """Filled by rank 0 while the check runs."""

    ranks: int
    hosts: dict[str, dict[str, float]] = field(default_factory=dict)  # numbers of each host, by the measure's name
    outliers: set[tuple[str, str]] = field(default_factory=set)  # (host, measure's name)
    clocks_ms: dict[str, float] = field(default_factory=dict)  # ahead of the others
    free_disk_gb: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, dict[str, float]] = field(default_factory=dict)  # gb_per_s (bus bandwidth), latency_us
    links: list[LinkRow] = field(default_factory=list)
    rounds: tuple[int, int] = (0, 0)  # of pairs: measured, in all
    findings: list[Finding] = field(default_factory=list)
    unreachable: bool = False  # some host from some other
    skipped: str = ""  # what was not measured, and why

    def add(self, where: str, text: str) -> None:
        """A finding, once."""
        if Finding(where, text) not in self.findings:
            self.findings.append(Finding(where, text))

    def outlier(self, host: str, measure: Measure, text: str) -> None:
        """A finding about a number of the table, which is marked there."""
        self.outliers.add((host, measure.name))
        self.add(host, text)

    def to_json(self) -> str:
        """An object with everything; numbers in the units that their names or MEASURES give."""
        record: dict[str, Any] = {"ok": not self.findings, **asdict(self)}
        record["outliers"] = sorted(self.outliers)
        record["findings"] = [asdict(finding) for finding in self.findings]
        return json.dumps(record, indent=1)


def table(report: Report) -> Table:
    """A row a host, its outliers marked with `<<`."""
    there = [each for each in MEASURES if any(each.name in numbers for numbers in report.hosts.values())]
    titles = [f"{each.name.removesuffix(' inside the host')} {each.unit}" for each in there]
    shown = Table("host", *titles, "clock ms", "free disk GB", box=None, pad_edge=False, header_style="")
    for host, numbers in report.hosts.items():
        cells = [_cell(numbers.get(each.name), (host, each.name) in report.outliers) for each in there]
        others = [_cell(values.get(host), (host, name) in report.outliers)
                  for name, values in (("clock", report.clocks_ms), ("free disk", report.free_disk_gb))]
        shown.add_row(host, *cells, *others)
    return shown


def lines(report: Report) -> list[str]:
    """What stands below the table: collectives, bad links, findings."""
    found = [f"{name} of all {report.ranks} ranks: {number(each['gb_per_s'])} GB/s bus bandwidth, "
             f"{number(each['latency_us'])} {LATENCY.unit} latency" for name, each in report.collectives.items()]
    if report.links:
        rates = sorted(link.gbit_per_s for link in report.links)
        found.append(f"{len(rates)} pairs of hosts: {number(rates[0])} to {number(rates[-1])} Gbit/s")
    found += [f"{' - '.join(link.hosts)}: {number(link.gbit_per_s)} Gbit/s, {number(link.latency_us)} us <<"
              for link in report.links if link.bad]
    if report.rounds[0] < report.rounds[1]:
        found.append(f"note: each host was measured with {report.rounds[0]} of {report.rounds[1]} others; "
                     "--rounds 0 takes all")
    found += [f"note: {report.skipped}"] if report.skipped else []
    return found + [f"BAD  {finding}" for finding in report.findings]


def _cell(value: float | None, marked: bool) -> str:
    return ("-" if value is None else number(value)) + (" <<" if marked else "")
