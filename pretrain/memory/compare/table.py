"""A comparison as a table on the terminal, as JSON and as CSV."""

import csv
import io
import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.config.layout import LAYOUT_FIELDS
from pretrain.errors import format_number
from pretrain.memory.compare.candidates import Candidate
from pretrain.memory.compare.choices import Choice
from pretrain.memory.compare.compare import ComparisonRow, Cost, Workload
from pretrain.memory.compare.largest_fit import LargestFit
from pretrain.memory.footprint import Footprint, in_unit
from pretrain.memory.step_time.block_traffic import LINKS
from pretrain.memory.step_time.calibrate import calibration_json
from pretrain.memory.step_time.traffic import link_bytes
from pretrain.progress import terminal_console

_NARROW = 80  # columns of the distinct choices, unless the terminal has fewer
_WIDE = 2000  # characters: more than any row has
_LONGEST_NAME = 40  # characters of a layout's name for which its sizes fit the same line
_MARGIN = 7  # columns of the words to the left of the heading
_WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
# columns for the device's memory: title -> roles that it sums
DEVICE_COLUMNS = {"params": ("parameters",), "grads": ("gradients",), "optim": ("master_weights", "optimizer_states"),
                  "activ": ("activations", "logits"), "other": ("buffers", "margin")}


@dataclass(frozen=True)
class ComparisonReport:
    """A comparison of layouts, with its recommendation and cost."""

    workload: Workload
    rows: list[ComparisonRow]
    choices: list[Choice]  # at most ten of the rows, which trade different things
    recommended: ComparisonRow | None
    cost: Cost | None
    impossible: dict[str, int]  # reason -> number of combinations
    heading: list[tuple[str, str]]  # printed above the table: (word at the margin, text)
    lines: list[str]  # printed below the table


def _sum(footprint: Footprint, roles: tuple[str, ...], location: str) -> int:
    return sum(footprint.total(role, location) for role in roles)


def _seconds(seconds: float) -> str:
    return f"{format_number(seconds)} s"


def table_cells(row: ComparisonRow, workload: Workload, unit: str) -> dict[str, str]:
    """Return the content of each column of one row, by the column's title."""
    layout, peak, time = row.candidate.layout, row.estimate.peak, row.time
    ranks = workload.cluster.gpus_per_node
    device = [in_unit(_sum(peak, roles, "device"), unit) for roles in DEVICE_COLUMNS.values()]
    deepspeed = "" if row.deepspeed is None else \
        f"{in_unit(row.deepspeed.device_bytes, unit)} / {in_unit(row.deepspeed.host_bytes, unit)}"
    speed = ["", "", "", ""] if time is None else [
        _seconds(time.total_seconds), f"{time.mfu:.0%}", f"{time.bubble_share:.0%}", f"{time.communication_share:.0%}"]
    titles = ("layout", "micro x acc.", *DEVICE_COLUMNS, unit, "host/node", "NVMe/node", "step", "MFU", "bubble",
              "comm.", "DeepSpeed", "verdict")
    texts = (row.candidate.name, f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}", *device,
             in_unit(row.estimate.device_bytes, unit), in_unit(row.estimate.host_bytes * ranks, unit),
             in_unit(row.estimate.nvme_bytes * ranks, unit), *speed, deepspeed, verdict(row))
    return dict(zip(titles, texts, strict=True))


def verdict(row: ComparisonRow) -> str:
    """Say whether the layout fits, and whether this project can run it."""
    if row.shortage:
        return f"too large: {row.shortage}"
    return f"fits; rejected by train.py: {row.candidate.rejection}" if row.candidate.rejection else "fits"


def short_verdict(row: ComparisonRow) -> str:
    """Return the verdict without its reason."""
    if row.shortage:
        return "too large"
    return "rejected" if row.candidate.rejection else "fits"


def print_choices(report: ComparisonReport, unit: str, console: Console | None = None) -> None:
    """Print the recommendation, the distinct choices with what each trades, and the lines below, in 80 columns."""
    console = console or wide_console()
    width = min(_NARROW, console.width)
    lines = [*_heading(report, width), ""]
    lengths = [len(choice.row.candidate.name) for choice in report.choices]
    longest = max((length for length in lengths if length <= _LONGEST_NAME), default=_LONGEST_NAME)
    for number, choice in enumerate(report.choices, 1):
        cells = table_cells(choice.row, report.workload, unit)
        sizes = f"{cells['micro x acc.']:>9} {cells[unit]:>6} {unit} {cells['step']:>8} MFU {cells['MFU']:>3}"
        name = f"{number:>2} {choice.row.candidate.name:<{longest}}"
        lines += [name + sizes] if len(name) <= longest + 3 else [name, " " * (longest + 3) + sizes]
        lines += _wrapped(choice.trade, width, indent="     ")
    lines += ["", *_wrapped(_counts(report), width)]
    lines += [line for text in report.lines for line in _wrapped(text, width)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(report: ComparisonReport, width: int) -> list[str]:
    """Return the lines above the table, with the texts to the right of their words."""
    return [line for word, text in report.heading for line in
            textwrap.wrap(text, width, initial_indent=f"{word:<{_MARGIN}}" if word else "",
                          subsequent_indent=" " * _MARGIN if word else "", **_WRAP)]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, **_WRAP)


def _counts(report: ComparisonReport) -> str:
    """Say how many layouts the choices represent, and what their columns are."""
    fit = sum(row.recommendable for row in report.rows)
    columns = "micro-batch x accumulation, memory of a device at its peak, step time, and what it gives for what, " \
              "compared with the first"
    if len(report.choices) == len(report.rows):
        return f"{columns}. --all shows a table with more columns"
    return f"{columns}. {len(report.choices)} distinct choices of {len(report.rows)} layouts, of which {fit} fit: " \
           "--all (a table with more columns), --csv and --json have the others"


def print_report(report: ComparisonReport, unit: str, console: Console | None = None) -> None:
    """Print the recommendation, the table of all layouts, and the lines below it. Layouts that do not fit are grey."""
    console = console or wide_console()
    print_lines([*_heading(report, console.width), ""], console)
    shown = report.rows
    rows = [table_cells(row, report.workload, unit) for row in shown]
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


def print_largest(found: list[LargestFit], lines: list[str]) -> None:
    """Print the results of --find, one row per layout, the largest first."""
    console = wide_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layout")
    table.add_column({"max_model": "parameters", "max_seq": "tokens", "max_micro_batch": "samples"}[found[0].kind],
                     justify="right")
    table.add_column("why the next larger one does not fit", overflow="fold")
    for fit in sorted(found, key=lambda fit: -fit.value):
        limit = "; the search ends here" if fit.reached_end else ""
        table.add_row(fit.candidate.name, f"{fit.value:,}", fit.detail + limit,
                      style="" if fit.value else "bright_black")
    console.print(table)
    print_lines(lines, console)


def row_json(row: ComparisonRow) -> dict[str, Any]:
    """Return one row as JSON, with the bytes of one rank and the seconds of one step."""
    time, layout = row.time, row.candidate.layout
    return {
        "name": row.candidate.name, "path": row.candidate.path, "fits": row.fits, "misfit": row.shortage,
        "runs_here": not row.candidate.rejection, "refusal": row.candidate.rejection,
        "layout": {name: getattr(layout, name) for name in LAYOUT_FIELDS},
        "steady": row.estimate.steady.to_json(), "peak": row.estimate.peak.to_json(),
        "device_bytes": row.estimate.device_bytes, "host_bytes": row.estimate.host_bytes,
        "nvme_bytes": row.estimate.nvme_bytes,
        "step_bytes": {link: round(link_bytes(row.traffic, link)) for link in LINKS},
        "transfers": [asdict(transfer) for transfer in row.traffic],
        "step_time": None if time is None else {
            **asdict(time), "total_seconds": time.total_seconds, "mfu": time.mfu, "bubble_share": time.bubble_share,
            "communication_share": time.communication_share},
        "deepspeed_estimate": None if row.deepspeed is None else asdict(row.deepspeed),
        "deepspeed_config": row.candidate.config,
    }


def report_json(report: ComparisonReport) -> str:
    """Return the comparison as JSON."""
    workload = report.workload
    return json.dumps({
        "model": workload.name, "num_parameters": workload.num_parameters,
        "cluster": {**asdict(workload.cluster), "device_budget_bytes": workload.cluster.device_budget_bytes,
                    "host_budget_bytes": workload.cluster.host_budget_bytes},
        "recommended": report.recommended.candidate.name if report.recommended else None,
        "choices": [{"name": choice.row.candidate.name, "trade": choice.trade} for choice in report.choices],
        "verdict": [{"about": word, "text": text} for word, text in report.heading if word],
        "calibration": calibration_json(workload.calibration) if workload.calibration else None,
        "time_parameters": asdict(workload.time_parameters),
        "cost": asdict(report.cost) if report.cost else None, "impossible": report.impossible,
        "rows": [row_json(row) for row in report.rows]}, indent=2) + "\n"


def largest_json(found: list[LargestFit]) -> str:
    """Return the results of --find as JSON."""
    return json.dumps([{"name": fit.candidate.name, "kind": fit.kind, "value": fit.value, "detail": fit.detail,
                        "reached_end": fit.reached_end} for fit in found], indent=2) + "\n"


def report_csv(report: ComparisonReport) -> str:
    """Return the rows as CSV, with the bytes of one rank."""
    text = io.StringIO()
    lines = [_csv_row(row) for row in report.rows]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _csv_row(row: ComparisonRow) -> dict[str, Any]:
    """Return one row of the CSV: {column: value}."""
    layout, peak, time = row.candidate.layout, row.estimate.peak, row.time
    return {
        "name": row.candidate.name, **_layout_columns(row.candidate),
        **{f"{role}_bytes": _sum(peak, (role,), "device") for roles in DEVICE_COLUMNS.values() for role in roles},
        "device_bytes": row.estimate.device_bytes, "host_bytes": row.estimate.host_bytes,
        "nvme_bytes": row.estimate.nvme_bytes,
        **{f"{link}_step_bytes": round(link_bytes(row.traffic, link)) for link in LINKS},
        "step_time_ms": time.total_seconds * 1e3 if time else None, "mfu": time.mfu if time else None,
        "bubble_share": time.bubble_share if time else None,
        "communication_share": time.communication_share if time else None,
        "deepspeed_device_bytes": row.deepspeed.device_bytes if row.deepspeed else None,
        "deepspeed_host_bytes": row.deepspeed.host_bytes if row.deepspeed else None,
        "tokens_per_step": layout.tokens_per_step, "fits": row.fits, "misfit": row.shortage,
        "refusal": row.candidate.rejection,
    }


def _layout_columns(candidate: Candidate) -> dict[str, Any]:
    names = ("zero_stage", "offload_optimizer", "offload_param", "pipeline_stages", "tensor_parallel_size",
             "sequence_parallel_size", "expert_parallel_size", "data_parallel_size", "precision", "grad_accum_dtype",
             "activation_checkpoint_interval", "recompute", "offload_activations", "micro_batch_size",
             "gradient_accumulation_steps", "seq_length")
    return {name: getattr(candidate.layout, name) for name in names}
