"""Advice for a run that ran out of memory: the prediction, what was available, and changes that should fit."""

import gc
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config.layout import Layout
from pretrain.distributed.world import World
from pretrain.memory.estimate.model_shape import shape_of
from pretrain.memory.hardware import make_cluster
from pretrain.memory.measure.out_of_memory import is_out_of_memory
from pretrain.memory.report.memory_watch import sizes_by_role
from pretrain.memory.search.axes import OFFLOADS, RECOMPUTE_CHOICES, Axes
from pretrain.memory.search.candidates import Candidate, generate_candidates
from pretrain.memory.search.compare import Workload, estimate_candidate
from pretrain.memory.sizes import with_unit
from pretrain.model.recompute import Recompute

if TYPE_CHECKING:
    from pretrain.memory.report.memory_watch import MemoryWatch

_MAX_FRACTION = 0.85  # of the failed layout's predicted memory: changes that need more are not suggested
_MAX_CHANGES = 3


def advice(watch: "MemoryWatch", error: BaseException) -> list[str]:
    """Describe an out-of-memory error and list changes that should fit. Returns no lines for any other error.

    Frees the memory that the frames of the error's traceback reference.
    """
    if not is_out_of_memory(error):
        return []
    measured = with_unit(watch.measured_bytes())
    used = f"the process had grown by {measured}" if watch.device_kind == "cpu" else \
        f"{measured} were in use before the error"
    lines = [f"out of memory{_location(error)}: {_first_line(error)}"]
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    predicted = watch.predicted
    needed = watch.needed_bytes(predicted)
    lines.append(f"predicted {with_unit(needed)} of tensors at the peak ({sizes_by_role(predicted)}); {used}; "
                 f"{with_unit(watch.available_bytes)} were available for tensors")
    changes = changes_that_fit(watch, min(watch.available_bytes, int(_MAX_FRACTION * needed)))
    if not changes:
        return [*lines, "no other layout of these ranks is predicted to fit: use more ranks or a smaller model"]
    return [*lines, "changes that are predicted to fit, the fastest first:", *(f"  {change}" for change in changes)]


def changes_that_fit(watch: "MemoryWatch", budget_bytes: int) -> list[str]:
    """Describe at most three changes of the layout that fit the budget, the fastest first.

    A change is left out if a faster suggestion changes the same settings, or only some of them.
    """
    layout, local_size, model = watch.plan.layout, watch.world.local_size, watch.plan.model
    ranks_per_node = local_size if layout.world_size % local_size == 0 else 1
    cluster = make_cluster(gpu=None, world_size=layout.world_size, nodes=None, gpus_per_node=ranks_per_node)
    workload = Workload(cluster, model.num_parameters(), shape_of(model), model)
    fitting = []
    for candidate in alternatives(layout, workload):
        row = estimate_candidate(candidate, workload)
        needed = watch.needed_bytes(row.estimate)
        if not row.rejection and row.time and needed <= budget_bytes:
            changed = differences(layout, candidate.layout)
            fitting.append((round(row.time.total_seconds, 6), len(changed), -needed, changed))
    chosen: list[dict[str, str]] = []
    lines = []
    for _, _, negative_needed, changed in sorted(fitting, key=lambda item: item[:3]):
        if changed and not any(earlier.keys() <= changed.keys() for earlier in chosen) and len(chosen) < _MAX_CHANGES:
            chosen.append(changed)
            lines.append(f"{', '.join(changed.values())}: {with_unit(-negative_needed)}")
    return lines


def alternatives(layout: Layout, workload: Workload) -> list[Candidate]:
    """Return layouts with the same ranks, model and global batch, and with one or more changes.

    The changes are higher ZeRO stages, offload to the host, recomputation of attention, of the MLP, or of blocks, with
    or without their inputs in host memory, twice the pipeline stages, and smaller micro-batches.
    """
    micro_batch_sizes = [size for size in range(1, layout.micro_batch_size + 1) if layout.micro_batch_size % size == 0]
    interval = layout.activation_checkpoint_interval
    on_device = ("none", "attention", "mlp")
    axes = Axes(
        zero_stages=tuple(stage for stage in range(4) if stage >= layout.zero_stage),
        offloads=tuple(choice for choice in OFFLOADS if "nvme" not in choice),
        pipeline_stages=tuple({layout.pipeline_stages, 2 * layout.pipeline_stages}),
        precisions=(layout.precision,), activation_checkpoint_intervals=tuple({interval, 1}),
        recomputes=on_device if layout.device_kind == "cpu" else RECOMPUTE_CHOICES,
        micro_batch_sizes=tuple(micro_batch_sizes), seq_lengths=(layout.seq_length,),
        global_batch_size=layout.global_batch_size, grad_accum_dtypes=(layout.grad_accum_dtype or "",))
    kept = {name: getattr(layout, name) for name in ("optimizer", "optimizer_moments", "device_kind", "overlap_comm",
                                                     "document_attention")}
    return [replace(candidate, layout=replace(candidate.layout, **kept))
            for candidate in generate_candidates(axes, workload.cluster, workload.shape).candidates]


def differences(old: Layout, new: Layout) -> dict[str, str]:
    """Describe each difference between two layouts with keys of the DeepSpeed JSON. Returns {short name: text}."""
    changed = {}
    if new.micro_batch_size != old.micro_batch_size:
        changed["micro"] = f"micro-batch {new.micro_batch_size} x {new.gradient_accumulation_steps} accumulation steps"
    if _mode(new.recomputation) != _mode(old.recomputation):
        changed["recompute"] = _recompute_settings(old, new)
    for short, field, key in (("zero", "zero_stage", "zero_optimization.stage"),
                              ("optimizer", "offload_optimizer", "zero_optimization.offload_optimizer.device"),
                              ("param", "offload_param", "zero_optimization.offload_param.device"),
                              ("pipeline", "pipeline_stages", "pipeline.stages")):
        if getattr(new, field) != getattr(old, field):
            changed[short] = f"{key} {getattr(new, field)}"
    return changed


def _mode(recompute: Recompute) -> Recompute:
    """Return the settings in one spelling: recomputing every block is the same as an interval of 1."""
    return replace(recompute, part="none", interval=1) if recompute.part == "blocks" and recompute.every == 1 \
        else recompute


def _recompute_settings(old: Layout, new: Layout) -> str:
    """Return the keys and flags that change the recomputation from that of the old to that of the new layout."""
    if new.recompute != "none":
        return f"--recompute {new.recompute}"
    settings = []
    if new.activation_checkpoint_interval != old.activation_checkpoint_interval and old.recompute != "blocks":
        settings.append(f'"pipeline": {{"activation_checkpoint_interval": {new.activation_checkpoint_interval}}}')
        settings += ["without --recompute"] if old.recompute != "none" else []
    if new.offload_activations and not old.offload_activations:
        settings.append('"activation_checkpointing": {"cpu_checkpointing": true}')
    return " and ".join(settings) or "--recompute blocks"


def print_advice(lines: list[str], world: World) -> None:
    """Print the lines with this rank's number, because other ranks may have enough memory."""
    print("\n".join(f"ds-pretrain: {'error: ' if not number else ''}rank {world.rank}: {line}"
                    for number, line in enumerate(lines)), file=sys.stderr, flush=True)


def _location(error: BaseException) -> str:
    """Return function, file and line of the innermost frame in this package, or "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if f"{os.sep}pretrain{os.sep}" in frame.filename]
    return f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
