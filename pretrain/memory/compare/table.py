"""A comparison as a table on the terminal. Callers may add columns."""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.errors import format_number
from pretrain.memory.compare.compare import ComparisonRow, Workload
from pretrain.memory.footprint import Footprint, in_unit
from pretrain.progress import terminal_console

_WIDE = 2000  # characters: more than any row has
_MARGIN = 7  # columns of the words to the left of the heading
_WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
# columns for the device's memory: title -> roles that it sums
DEVICE_COLUMNS = {"params": ("parameters",), "grads": ("gradients",), "optim": ("master_weights", "optimizer_states"),
                  "activ": ("activations", "logits"), "other": ("buffers", "margin")}


@dataclass(frozen=True)
class ComparisonReport:
    """A comparison of layouts, with its recommendation."""

    workload: Workload
    rows: list[ComparisonRow]
    recommended: ComparisonRow | None
    impossible: dict[str, int]  # reason -> number of combinations
    heading: list[tuple[str, str]]  # printed above the table: (word at the margin, text)
    lines: list[str]  # printed below the table


def _sum(footprint: Footprint, roles: tuple[str, ...], location: str) -> int:
    return sum(footprint.total(role, location) for role in roles)


def step_cells(row: ComparisonRow) -> dict[str, str]:
    """Return the column of the step time, by its title; {} if nothing predicts it."""
    return {"step": f"{format_number(row.step_seconds)} s"} if row.step else {}


def table_cells(row: ComparisonRow, workload: Workload, unit: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the content of each column of one row, by the column's title; `columns`: those before the last one."""
    layout, peak = row.candidate.layout, row.estimate.peak
    ranks = workload.cluster.gpus_per_node
    return {
        "layout": row.candidate.name,
        "micro x acc.": f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}",
        **{title: in_unit(_sum(peak, roles, "device"), unit) for title, roles in DEVICE_COLUMNS.items()},
        unit: in_unit(row.estimate.device_bytes, unit), "host/node": in_unit(row.estimate.host_bytes * ranks, unit),
        "NVMe/node": in_unit(row.estimate.nvme_bytes * ranks, unit), **columns, "verdict": verdict(row)}


def verdict(row: ComparisonRow) -> str:
    """Say whether the layout fits, and whether this project can run it."""
    if row.shortage:
        return f"too large: {row.shortage}"
    return f"fits; rejected by train.py: {row.candidate.rejection}" if row.candidate.rejection else "fits"


def short_verdict(row: ComparisonRow) -> str:
    """Return the same without its reason."""
    if row.shortage:
        return "too large"
    return "rejected" if row.candidate.rejection else "fits"


def heading_lines(report: ComparisonReport, width: int) -> list[str]:
    """Return the lines above the table, with the texts to the right of their words."""
    return [line for word, text in report.heading for line in
            textwrap.wrap(text, width, initial_indent=f"{word:<{_MARGIN}}" if word else "",
                          subsequent_indent=" " * _MARGIN if word else "", **_WRAP)]


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, **_WRAP)


def print_report(report: ComparisonReport, unit: str, console: Console | None = None,
                 columns: Callable[[ComparisonRow], Mapping[str, str]] = step_cells) -> None:
    """Print the recommendation, the table of all layouts, and the lines below it. Layouts that do not fit are grey."""
    console = console or wide_console()
    print_lines([*heading_lines(report, console.width), ""], console)
    shown = report.rows
    rows = [table_cells(row, report.workload, unit, columns(row)) for row in shown]
    hidden = []
    if shown_columns(rows, console.width, keep=("verdict",)) != list(rows[0]):
        for line, row in zip(rows, shown, strict=True):
            line["verdict"] = short_verdict(row)
        hidden = ["the verdict's reasons"]
    styles = ["bold green" if row is report.recommended else "bright_black" if not row.fits else
              "yellow" if row.candidate.rejection else "" for row in shown]
    titles = print_table(rows, styles, console, keep=("layout", unit, "step", "verdict"))
    hidden = [title for title in rows[0] if title not in titles] + hidden
    print_lines([""], console)
    if hidden:
        print_lines([f"not shown at {console.width} columns: {', '.join(hidden)} (use a wider terminal, a pipe or "
                         "--csv)"], console)
    print_lines(report.lines, console)


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for every row if stdout is a pipe or a file."""
    return terminal_console(width=_WIDE)


def print_lines(lines: list[str], console: Console) -> None:
    """Print lines of text. On a terminal they are wrapped to its width; in a pipe or a file they are not."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def print_table(rows: list[dict[str, str]], styles: list[str], console: Console, *, keep: tuple[str, ...]) -> list[str]:
    """Print the columns that fit the console, and return their titles. Every row has one of the styles."""
    titles = shown_columns(rows, console.width, keep)
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for title in titles:
        table.add_column(title, justify="left" if title in ("layout", "verdict") else "right",
                         no_wrap=title != "verdict", overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(row[title] for title in titles), style=style)
    console.print(table)
    return titles


def shown_columns(rows: list[dict[str, str]], width: int, keep: tuple[str, ...]) -> list[str]:
    """Return the titles of the columns that fit into `width`. The last columns are dropped first, but never `keep`."""
    titles = list(rows[0])
    needed = {title: max(len(title), *(len(row[title]) for row in rows)) + 1 for title in titles}
    for title in reversed(rows[0]):
        if sum(needed[title] for title in titles) > width and title not in keep:
            titles.remove(title)
    return titles
