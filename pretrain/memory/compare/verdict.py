"""The lines above a comparison: which layout to use, why, what limits it, what the run costs, and notes on sizes."""

from pretrain.errors import format_number
from pretrain.memory.compare.choices import limit_text
from pretrain.memory.compare.compare import ComparisonRow, Workload, cost_lines
from pretrain.memory.compare.table import ComparisonReport
from pretrain.memory.footprint import in_unit
from pretrain.memory.step_time.time_parameters import model_error
from pretrain.model.tensor_core_sizes import size_notes

Lines = list[tuple[str, str]]  # (word at the margin, text)


def verdict_lines(report: ComparisonReport, unit: str, storage_rate: float) -> Lines:
    """Recommend a layout. Without one, name the layout that needs the least memory.

    Args:
        storage_rate: bytes a second that a node writes.
    """
    best, cluster = report.recommended, report.workload.cluster
    if best is None:
        nearest = min(report.rows, key=lambda row: row.estimate.device_bytes)
        return [("use", "no layout: none both fits and runs; the smallest on the device is "
                        f"{nearest.candidate.name} ({nearest.shortage or nearest.candidate.rejection})")]
    assert best.time is not None
    assert report.cost is not None
    layout = best.candidate.layout
    return [("use", f"{best.candidate.name}, micro-batch {layout.micro_batch_size} x "
                    f"{layout.gradient_accumulation_steps} accumulation: "
                    f"{in_unit(best.estimate.device_bytes, unit)} of {in_unit(cluster.gpu.memory_bytes, unit)} {unit}, "
                    f"{format_number(best.time.total_seconds)} s for a step of "
                    f"{layout.tokens_per_step:,} tokens (+-{model_error(layout):.0%}), MFU {best.time.mfu:.0%}"
                    f"{flags_of(best)}"),
            ("why", _reason(report, best)), ("limit", limit_text(best, report.workload)),
            *(("cost", line) for line in cost_lines(report.cost, cluster.nodes, storage_rate)),
            *(("note", note) for note in notes_on_sizes(best, report.workload))]


def _reason(report: ComparisonReport, best: ComparisonRow) -> str:
    accepted = [row for row in report.rows if row.recommendable and row.time]
    fastest = min(accepted, key=lambda row: row.time.total_seconds if row.time else 0.0)
    if fastest is best or fastest.time is None:
        return f"it is predicted to be the fastest of {len(accepted)} layouts that fit"
    return "it is the simplest of the layouts whose predicted times are equal within the error of the prediction; " \
           f"the shortest time is predicted for {fastest.candidate.name}: {format_number(fastest.time.total_seconds)} s"


def notes_on_sizes(best: ComparisonRow, workload: Workload) -> list[str]:
    """Note sizes of the model that tensor cores compute slowly in the recommended layout."""
    layout = best.candidate.layout
    if workload.model is None or workload.cluster.gpu.kind != "cuda":
        return []
    return size_notes(workload.model, tensor_parallel_size=layout.tensor_parallel_size,
                      element_bytes=layout.element_bytes)


def flags_of(row: ComparisonRow) -> str:
    """Return the flags of train.py that the layout needs in addition to its JSON."""
    part = row.candidate.layout.recompute
    return "" if part == "none" else f"; train it with --recompute {part}"
