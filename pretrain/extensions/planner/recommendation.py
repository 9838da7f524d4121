"""The lines above a comparison: which layout to use, why, what limits it, what the run costs, and notes on sizes."""

from dataclasses import replace

from pretrain.errors import format_number
from pretrain.extensions.planner.cost import Cost, cost_line
from pretrain.extensions.planner.estimates import time_of
from pretrain.memory.compare.compare import ComparisonRow, Workload, estimate_candidate
from pretrain.memory.compare.compare_zero import flags_of, no_layout
from pretrain.memory.footprint import checkpoint_text, with_unit
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
