"""The lines above a comparison: which layout to use, why, what limits it, what the run costs, and notes on sizes."""

from pretrain.errors import format_number
from pretrain.extensions.planner.choices import limit_text
from pretrain.extensions.planner.cost import Cost, cost_line
from pretrain.extensions.planner.estimates import time_of
from pretrain.memory.compare.compare import ComparisonRow, Workload
from pretrain.memory.compare.compare_zero import flags_of, no_layout
from pretrain.memory.footprint import checkpoint_text
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
        return f"it is predicted to be the fastest of {len(accepted)} layouts that fit"
    return "it is the simplest of the layouts whose predicted times are equal within the error of the prediction; " \
           f"the shortest time is predicted for {fastest.candidate.name}: {format_number(fastest.step_seconds)} s"


def _notes_on_sizes(best: ComparisonRow, workload: Workload) -> list[str]:
    """Note sizes of the model that tensor cores compute slowly in the recommended layout."""
    layout = best.candidate.layout
    if workload.model is None or workload.cluster.gpu.kind != "cuda":
        return []
    return size_notes(workload.model, tensor_parallel_size=layout.tensor_parallel_size,
                      element_bytes=layout.element_bytes)
