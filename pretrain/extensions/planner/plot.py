"""Bar chart of each layout's memory, with the device's capacity as a line: an HTML page that needs no other file."""

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.memory.compare.compare_zero import ComparisonReport, verdict
from pretrain.memory.footprint import GIB, ROLES, in_unit

COLOURS = dict(zip(ROLES, ("#4477aa", "#ee6677", "#228833", "#66ccee", "#bbbbbb", "#ccbb44", "#aa3377", "#dddddd"),
                   strict=True))
_BAR, _GAP, _WIDTH, _TOP = 18, 8, 640, 70  # pixels
_CHARACTER = 7.3  # pixels: width of a character of a label in a monospaced font of 12 px
_FADED = 0.3  # opacity of layouts that do not fit


@dataclass(frozen=True)
class Bar:
    """The bar of one layout."""

    name: str
    parts: tuple[tuple[str, float], ...]  # (role, GiB on the device)
    fits: bool
    comment: str  # the verdict, shown as a tooltip

    @property
    def total(self) -> float:
        return sum(size for _, size in self.parts)


def bars(report: ComparisonReport) -> list[Bar]:
    """Return a bar for each row of the report, in the same order."""
    return [Bar(f"{row.candidate.name}  {row.candidate.layout.micro_batch_size}x"
                f"{row.candidate.layout.gradient_accumulation_steps}",
                tuple((role, row.estimate.peak.total(role, "device") / GIB) for role in ROLES), row.fits,
                verdict(row)) for row in report.rows]


def check_plot(path: str) -> None:
    """Raise ConfigError unless the file name ends with .html."""
    if Path(path).suffix.lower() != ".html":
        raise ConfigError(f"--plot {path}", problem="the file name must end with .html")


def _title(report: ComparisonReport) -> str:
    cluster = report.workload.cluster
    return f"{report.workload.name}: GiB on each of {cluster.world_size} {cluster.gpu.name}"


def html(report: ComparisonReport) -> str:
    """Return a self-contained page with the chart. Tooltips show sizes and verdicts."""
    rows = bars(report)
    cluster = report.workload.cluster
    capacity, budget = cluster.gpu.memory_bytes / GIB, cluster.device_budget_bytes / GIB
    longest = min(max(*(bar.total for bar in rows), capacity) * 1.05, 3 * capacity)  # GiB; longer bars are cut off
    scale = _WIDTH / longest
    left = math.ceil(max(len(bar.name) for bar in rows) * _CHARACTER) + 16  # pixels
    height = _TOP + len(rows) * (_BAR + _GAP) + 30
    drawn = [_legend(), *(_bar(bar, number, scale, left) for number, bar in enumerate(rows))]
    for gib, dash, word in ((capacity, "", "device"), (budget, "4 3", "without the margin")):
        x = left + gib * scale
        side = "start" if not dash else "end"
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 12}" y2="{height - 24}" stroke="black" '
                     f'stroke-dasharray="{dash}"/><text x="{x:.1f}" y="{_TOP - 16 if dash else height - 8}" '
                     f'text-anchor="{side}">{word} {gib:.4g}</text>')
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(_title(report))}</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} text {{ font: 12px monospace }}</style>
<h1>{escape(_title(report))}</h1>
<svg width="{left + _WIDTH + 90}" height="{height}" role="img">
{chr(10).join(drawn)}
</svg>
{"".join(f"<p>{escape(line)}</p>" for line in report.lines)}
</html>
"""


def _legend() -> str:
    items = []
    for number, (role, colour) in enumerate(COLOURS.items()):
        x, y = number % 4 * 170, number // 4 * 18 + 4
        items.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{x + 17}" y="{y + 10}">{escape(role.replace("_", " "))}</text>')
    return "".join(items)


def _bar(bar: Bar, number: int, scale: float, left: int) -> str:
    """Return the SVG of bar `number`, at `scale` pixels per GiB, to the right of labels `left` pixels wide."""
    y, x = _TOP + number * (_BAR + _GAP), float(left)
    drawn = []
    for role, gib in bar.parts:
        width = min(gib * scale, left + _WIDTH - x)
        if width > 0:
            drawn.append(f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{COLOURS[role]}">'
                         f"<title>{escape(role.replace('_', ' '))}: {gib:.2f} GiB</title></rect>")
            x += width
    return f'<g opacity="{1 if bar.fits else _FADED}"><title>{escape(bar.comment)}</title>' \
           f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(bar.name)}</text>{"".join(drawn)}' \
           f'<text x="{x + 5:.1f}" y="{y + 13}">{in_unit(bar.total * GIB, "GiB")}</text></g>'
