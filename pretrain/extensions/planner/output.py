"""A comparison with step times: the distinct choices on the terminal, columns of the table, JSON and CSV."""

import csv
import io
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.config.layout import LAYOUT_FIELDS
from pretrain.errors import counted, format_number
from pretrain.extensions.planner.choices import Choice
from pretrain.extensions.planner.cost import Cost, cost_line
from pretrain.extensions.planner.deepspeed_formulas import DeepSpeedEstimate, deepspeed_estimate
from pretrain.extensions.planner.estimates import time_of
from pretrain.extensions.planner.largest_fit import LargestFit
from pretrain.extensions.planner.step_time.block_traffic import LINKS, Transfer
from pretrain.extensions.planner.step_time.calibrate import Calibration, calibration_json
from pretrain.extensions.planner.step_time.time_parameters import TimeParameters
from pretrain.extensions.planner.step_time.traffic import link_bytes, rank_parameters, step_traffic
from pretrain.memory.compare.compare import ComparisonRow, Workload, estimate_candidate
from pretrain.memory.compare.compare_zero import (
    DEVICE_COLUMNS,
    ComparisonReport,
    flags_of,
    heading_lines,
    no_layout,
    print_lines,
    step_cells,
    table_cells,
    wide_console,
    wrapped,
)
from pretrain.memory.footprint import checkpoint_text, in_unit, with_unit
from pretrain.model.tensor_core_sizes import size_notes

Lines = list[tuple[str, str]]  # (word at the margin, text)


def recommendation_lines(rows: list[ComparisonRow], best: ComparisonRow | None, cost: Cost | None, workload: Workload,
                         unit: str, storage_rate: float) -> Lines:
    """Recommend a layout. Without one, name the layout that needs the least memory.

    Args:
        storage_rate: bytes a second that a node writes.
    """
    if best is None:
        return [("use", no_layout(rows))]
    assert cost is not None
    layout, cluster = best.candidate.layout, workload.cluster
    return [("use", f"{best.describe(cluster, unit)}, {format_number(best.step_seconds)} s for a step of "
                    f"{layout.tokens_per_step:,} tokens (+-{best.step['relative_error']:.0%}), MFU "
                    f"{best.step['mfu']:.0%}{flags_of(best)}"),
            ("why", _reason(rows, best)), ("limit", limit_text(best, workload)),
            ("cost", cost_line(cost)),
            ("cost", checkpoint_text(cost.checkpoint_bytes, cluster.nodes, storage_rate)),
            *(("note", note) for note in _notes_on_sizes(best, workload))]


def _reason(rows: list[ComparisonRow], best: ComparisonRow) -> str:
    accepted = [row for row in rows if row.recommendable and time_of(row)]
    fastest = min(accepted, key=lambda row: row.step_seconds)
    if fastest is best:
        return f"it is predicted to be the fastest of {len(accepted)} layouts that fit" if len(accepted) > 1 else \
            "no other layout fits"
    return "it is the simplest of the layouts whose predicted times are equal within the error of the prediction; " \
           f"the shortest time is predicted for {fastest.candidate.name}: {format_number(fastest.step_seconds)} s"


def limit_text(best: ComparisonRow, workload: Workload) -> str:
    """Say what limits the speed of a layout: compute, memory, the network, ... with the parts of its step."""
    time = time_of(best)
    assert time is not None
    layout, total = best.candidate.layout, time.total_seconds
    parts = {"network": time.network_seconds, "host link and disks": time.pcie_seconds + time.disk_seconds,
             "pipeline bubble": time.bubble_seconds, "launches by the host": time.launch_seconds}
    kernels = time.compute_seconds + time.optimizer_seconds
    saved, memory = 0.0, f"{best.estimate.device_bytes / workload.cluster.gpu.memory_bytes:.0%} of a device is used"
    if layout.recomputation.is_on or layout.offload_optimizer != "none":
        roomy = replace(layout, recompute="none", activation_checkpoint_interval=0, offload_activations=False,
                        offload_optimizer="none", offload_param="none")
        row = estimate_candidate(replace(best.candidate, layout=roomy), workload)
        saved = max(0.0, total - row.step_seconds)
        memory = f"without recomputation and offload {format_number(row.step_seconds)} s, in " \
                 f"{with_unit(row.estimate.device_bytes)}"
    shares = {"compute": kernels - saved, "memory": saved, **parts}
    limit = max(shares, key=lambda name: shares[name])
    waits = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds >= 0.005 * total)
    return f"{limit}: kernels take {kernels / total:.0%} of the step{', ' + waits if waits else ''}; memory: {memory}"


def _notes_on_sizes(best: ComparisonRow, workload: Workload) -> list[str]:
    """Note sizes of the model that tensor cores compute slowly in the recommended layout."""
    layout = best.candidate.layout
    if workload.model is None or workload.cluster.gpu.kind != "cuda":
        return []
    return size_notes(workload.model, tensor_parallel_size=layout.tensor_parallel_size,
                      element_bytes=layout.element_bytes)


_CSV_FIELDS = (  # fields of Layout
    "zero_stage", "offload_optimizer", "offload_param", "pipeline_stages", "tensor_parallel_size",
    "sequence_parallel_size", "expert_parallel_size", "data_parallel_size", "precision", "grad_accum_dtype",
    "activation_checkpoint_interval", "recompute", "offload_activations", "micro_batch_size",
    "gradient_accumulation_steps", "seq_length")
_NARROW = 80  # columns of the distinct choices, unless the terminal has fewer
_LONGEST_NAME = 40  # characters of a layout's name for which its sizes fit the same line


@dataclass(frozen=True)
class PlannerReport(ComparisonReport):
    """A comparison of layouts, with its distinct choices and the cost of the recommended one."""

    choices: list[Choice]  # at most ten of the rows, which trade different things
    cost: Cost | None
    time_parameters: TimeParameters
    calibration: Calibration | None


def time_cells(row: ComparisonRow, workload: Workload, unit: str) -> dict[str, str]:
    """Return the columns with the step time, its parts and DeepSpeed's estimate, by title."""
    time, deepspeed = time_of(row), deepspeed_of(row, workload)
    cells = {"step": "", "MFU": "", "bubble": "", "comm.": ""} if time is None else {
        **step_cells(row), "MFU": f"{time.mfu:.0%}", "bubble": f"{time.bubble_share:.0%}",
        "comm.": f"{time.communication_share:.0%}"}
    return {**cells, "DeepSpeed": "" if deepspeed is None else
            f"{in_unit(deepspeed.device_bytes, unit)} / {in_unit(deepspeed.host_bytes, unit)}"}


def deepspeed_of(row: ComparisonRow, workload: Workload) -> DeepSpeedEstimate | None:
    """Return what DeepSpeed's own functions estimate for a row."""
    return deepspeed_estimate(row.candidate.layout, num_parameters=workload.num_parameters, model=workload.model,
                              nodes=workload.cluster.nodes, gpus_per_node=workload.cluster.gpus_per_node)


def transfers_of(row: ComparisonRow, workload: Workload) -> list[Transfer]:
    """Return the traffic of a rank in a step."""
    layout, model = row.candidate.layout, workload.model
    return step_traffic(layout, rank_parameters(layout, model, workload.num_parameters), model)


def print_choices(report: PlannerReport, unit: str, console: Console | None = None) -> None:
    """Print the recommendation, the distinct choices with what each trades, and the lines below, in 80 columns."""
    console = console or wide_console()
    width = min(_NARROW, console.width)
    lines = [*heading_lines(report, width), ""]
    lengths = [len(choice.row.candidate.name) for choice in report.choices]
    longest = max((length for length in lengths if length <= _LONGEST_NAME), default=_LONGEST_NAME)
    for number, choice in enumerate(report.choices, 1):
        columns = time_cells(choice.row, report.workload, unit)
        cells = table_cells(choice.row, report.workload, unit, columns)
        sizes = f"{cells['micro x acc.']:>9} {cells[unit]:>6} {unit} {cells['step']:>8} MFU {cells['MFU']:>3}"
        name = f"{number:>2} {choice.row.candidate.name:<{longest}}"
        lines += [name + sizes] if len(name) <= longest + 3 else [name, " " * (longest + 3) + sizes]
        lines += wrapped(choice.trade, width, indent="     ")
    lines += ["", *wrapped(_counts(report), width)]
    lines += [line for text in report.lines for line in wrapped(text, width)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _counts(report: PlannerReport) -> str:
    """Say how many layouts the choices represent, and what their columns are."""
    fit = sum(row.recommendable for row in report.rows)
    columns = "micro-batch x accumulation, memory of a device at its peak, step time, and what it gives for what, " \
              "compared with the first"
    if len(report.choices) == len(report.rows):
        return f"{columns}. --all shows a table with more columns"
    shown = f"{counted(len(report.choices), 'distinct choice')} of {counted(len(report.rows), 'layout')}"
    return f"{columns}. {shown}, of which {fit} fit: " \
           "--all (a table with more columns), --csv and --json have the others"


def print_largest(found: list[LargestFit], lines: list[str]) -> None:
    """Print the results of --find, one row per layout, the largest first."""
    console = wide_console()
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("layout")
    rows.add_column({"max_model": "parameters", "max_seq": "tokens", "max_micro_batch": "samples"}[found[0].kind],
                    justify="right")
    rows.add_column("why the next larger one does not fit", overflow="fold")
    for fit in sorted(found, key=lambda fit: -fit.value):
        limit = "; the search ends here" if fit.reached_end else ""
        rows.add_row(fit.candidate.name, f"{fit.value:,}", fit.detail + limit,
                     style="" if fit.value else "bright_black")
    console.print(rows)
    print_lines(lines, console)


def largest_json(found: list[LargestFit]) -> str:
    """Return the results of --find as JSON."""
    return json.dumps([{"name": fit.candidate.name, "kind": fit.kind, "value": fit.value, "detail": fit.detail,
                        "reached_end": fit.reached_end} for fit in found], indent=2) + "\n"


def report_json(report: PlannerReport) -> str:
    """Return the comparison as JSON."""
    workload = report.workload
    return json.dumps({
        "model": workload.name, "num_parameters": workload.num_parameters,
        "cluster": {**asdict(workload.cluster), "device_budget_bytes": workload.cluster.device_budget_bytes,
                    "host_budget_bytes": workload.cluster.host_budget_bytes},
        "recommended": report.recommended.candidate.name if report.recommended else None,
        "choices": [{"name": choice.row.candidate.name, "trade": choice.trade} for choice in report.choices],
        "verdict": [{"about": word, "text": text} for word, text in report.heading if word],
        "calibration": calibration_json(report.calibration) if report.calibration else None,
        "time_parameters": asdict(report.time_parameters),
        "cost": asdict(report.cost) if report.cost else None, "impossible": report.impossible,
        "rows": [_row_json(row, workload) for row in report.rows]}, indent=2) + "\n"


def _row_json(row: ComparisonRow, workload: Workload) -> dict[str, Any]:
    """Return one row as JSON, with the bytes of one rank and the seconds of one step."""
    time, transfers, deepspeed = time_of(row), transfers_of(row, workload), deepspeed_of(row, workload)
    return {
        "name": row.candidate.name, "path": row.candidate.path, "fits": row.fits, "misfit": row.shortage,
        "runs_here": not row.candidate.rejection, "refusal": row.candidate.rejection,
        "layout": {name: getattr(row.candidate.layout, name) for name in LAYOUT_FIELDS},
        "steady": row.estimate.steady.to_json(), "peak": row.estimate.peak.to_json(), **_bytes_of(row),
        "step_bytes": {link: round(link_bytes(transfers, link)) for link in LINKS},
        "transfers": [asdict(transfer) for transfer in transfers],
        "step_time": None if time is None else {
            **asdict(time), "total_seconds": time.total_seconds, "mfu": time.mfu, "bubble_share": time.bubble_share,
            "communication_share": time.communication_share},
        "deepspeed_estimate": None if deepspeed is None else asdict(deepspeed),
        "deepspeed_config": row.candidate.config,
    }


def _bytes_of(row: ComparisonRow) -> dict[str, int]:
    """Return the bytes of one rank by location."""
    estimate = row.estimate
    return {"device_bytes": estimate.device_bytes, "host_bytes": estimate.host_bytes, "nvme_bytes": estimate.nvme_bytes}


def report_csv(report: PlannerReport) -> str:
    """Return the rows as CSV."""
    text = io.StringIO()
    lines = [_csv_row(row, report.workload) for row in report.rows]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _csv_row(row: ComparisonRow, workload: Workload) -> dict[str, Any]:
    """Return one row of the CSV, with the bytes of one rank: {column: value}."""
    layout, time, transfers = row.candidate.layout, time_of(row), transfers_of(row, workload)
    deepspeed = deepspeed_of(row, workload)
    return {
        "name": row.candidate.name, **{name: getattr(layout, name) for name in _CSV_FIELDS},
        **{f"{role}_bytes": row.estimate.peak.total(role, "device")
           for roles in DEVICE_COLUMNS.values() for role in roles}, **_bytes_of(row),
        **{f"{link}_step_bytes": round(link_bytes(transfers, link)) for link in LINKS},
        "step_time_ms": time.total_seconds * 1e3 if time else None, "mfu": time.mfu if time else None,
        "bubble_share": time.bubble_share if time else None,
        "communication_share": time.communication_share if time else None,
        "deepspeed_device_bytes": deepspeed.device_bytes if deepspeed else None,
        "deepspeed_host_bytes": deepspeed.host_bytes if deepspeed else None,
        "tokens_per_step": layout.tokens_per_step, "fits": row.fits, "misfit": row.shortage,
        "refusal": row.candidate.rejection,
    }
