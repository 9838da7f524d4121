"""`ds-pretrain compare`: a table with the memory of each layout, and the simplest layout that fits."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.cli import Parser, path_text, text, whole_number
from pretrain.errors import FINISHED, NOTHING_FITS, ConfigError, file_errors, format_number
from pretrain.memory.compare.candidates import generate_candidates
from pretrain.memory.compare.combinations import Axes
from pretrain.memory.compare.compare import ComparisonRow, Workload, compare, display_order, recommend
from pretrain.memory.footprint import GIB, in_unit
from pretrain.memory.hardware import GPUS, Cluster, make_cluster
from pretrain.model.config import load_model_config
from pretrain.paths import check_file
from pretrain.progress import terminal_console

DEFAULT_SEQ_LENGTH = 1024  # tokens, as in train.py
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit code. Raises ConfigError."""
    flags = _parser().parse_args(argv)
    if flags.write is not None:
        check_file(Path(flags.write), "--write")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which some models need, would detect one and warn
    cluster = make_cluster(gpu=flags.gpu, world_size=flags.world_size, nodes=flags.nodes,
                           gpus_per_node=flags.gpus_per_node)
    model = load_model_config(flags.model, flags.model_overrides)
    axes = Axes(zero_stages=tuple(flags.zero_stage), global_batch_size=flags.global_batch_size,
                seq_lengths=(flags.seq_length or min(DEFAULT_SEQ_LENGTH, model.max_positions),))
    report = make_report(Workload.of(model, cluster, flags.model), axes)
    print_report(report, unit_of(cluster))
    if flags.write is not None:
        write_recommended(flags.write, report.recommended)
    return NOTHING_FITS if report.recommended is None else FINISHED


def _parser() -> Parser:
    parser = Parser(description="Compare the memory of a model's layouts on given GPUs: ZeRO stages, offload, "
                                "pipeline stages, recomputation.")
    parser.add_argument("--model", type=path_text, required=True,
                        help="preset name, transformers config.json, or a folder that holds one")
    parser.add_argument("--model_overrides", type=text, help="changes to the config.json: n_layer=4,vocab_size=8000")
    add_machines(parser)
    count = whole_number(1, 10**8)
    parser.add_argument("--zero_stage", nargs="+", type=whole_number(0, 3), default=(0, 1, 2, 3),
                        help="ZeRO stages (default: all)")
    parser.add_argument("--global_batch_size", type=count, help="samples per step (default: 8 per GPU)")
    parser.add_argument("--seq_length", type=count,
                        help=f"tokens per sample (default: {DEFAULT_SEQ_LENGTH}, or the model's positions if there are "
                             "fewer)")
    parser.add_argument("--write", type=path_text, metavar="FILE",
                        help="write the recommended layout as a DeepSpeed JSON")
    return parser


def add_machines(group: Any) -> None:
    """Add the flags that describe the machines to a parser, or to a group of it."""
    for flag, about in (("world_size", "GPUs"), ("nodes", "machines"),
                        ("gpus_per_node", "GPUs per machine (default: 8)")):
        group.add_argument(f"--{flag}", type=whole_number(1, 10**7), help=about)
    group.add_argument("--gpu", type=text,
                       help=f"{', '.join(GPUS)}, or a memory size in GiB (default: this machine's GPU, or h100)")


def make_report(workload: Workload, axes: Axes) -> ComparisonReport:
    """Compare the layouts. Return the rows in display order, with the recommended one."""
    cluster = workload.cluster
    candidates = generate_candidates(axes, cluster, workload.model, device_kind=cluster.gpu.kind)
    rows = compare(candidates.candidates, workload)
    best = recommend(rows)
    rows, unit = display_order(rows, best), unit_of(cluster)
    use = f"{best.describe(cluster, unit)}{flags_of(best)}" if best is not None else no_layout(rows)
    return ComparisonReport(workload, rows, best, candidates.impossible, [("", title_of(workload)), ("use", use)],
                            [unit_line(cluster, unit), *impossible_lines(candidates.impossible)])


def unit_of(cluster: Cluster) -> str:
    """Return the unit of a table that suits the sizes."""
    return "GiB" if cluster.gpu.memory_bytes >= GIB else "MiB"


def title_of(workload: Workload) -> str:
    """Name the model and the machines."""
    count = f" ({workload.num_parameters:,} parameters)" if workload.model else ""
    return f"{workload.name}{count} on {workload.cluster.describe()}"


def no_layout(rows: list[ComparisonRow]) -> str:
    """Say that no layout can be used, and name the one that needs the least memory."""
    nearest = min(rows, key=lambda row: row.estimate.device_bytes)
    return "no layout: none both fits and runs; the smallest on the device is " \
           f"{nearest.candidate.name} ({nearest.shortage or nearest.candidate.rejection})"


def flags_of(row: ComparisonRow) -> str:
    """Return the flags of train.py that the layout needs in addition to its JSON."""
    part = row.candidate.layout.recompute
    return "" if part == "none" else f"; train it with --recompute {part}"


def unit_line(cluster: Cluster, unit: str) -> str:
    """Say what the sizes in a table are, and when a layout fits."""
    return f"{unit} of one rank at its peak, host and NVMe of a node; a layout fits into the device less " \
           f"{cluster.margin:.0%} and the host memory less 10%"


def impossible_lines(impossible: Mapping[str, int], *, one_line_each: bool = False) -> list[str]:
    """Say why combinations are impossible. `impossible` maps each reason to a number of combinations."""
    if one_line_each or len(impossible) < 3:
        return [f"impossible: {reason} ({number} combinations)" if number > 1 else f"impossible: {reason}"
                for reason, number in impossible.items()]
    return ["impossible: " + "; ".join(f"{reason} ({number})" for reason, number in impossible.items())]


def write_output(path: str, content: str) -> None:
    """Write a text to a file, or to stdout if the path is "-". Raises ConfigError."""
    if path == "-":
        sys.stdout.write(content)
        return
    with file_errors(path, "cannot write the file: {}"):
        Path(path).write_text(content, encoding="utf-8")


def write_recommended(path: str, best: ComparisonRow | None) -> None:
    """Write the recommended layout as a DeepSpeed JSON. Raises ConfigError if there is none."""
    if best is None:
        raise ConfigError("--write", problem="there is no layout that fits and that this project can run",
                          remedy="Use more GPUs, larger GPUs, or a smaller model")
    write_output(path, json.dumps(best.candidate.config, indent=2) + "\n")
    print(f"wrote {path}: {best.candidate.name}{flags_of(best)}", file=sys.stderr)


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
        **{title: in_unit(sum(peak.total(role, "device") for role in roles), unit)
           for title, roles in DEVICE_COLUMNS.items()},
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
