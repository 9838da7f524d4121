"""Changes of a layout that fit into less memory: `python -m pretrain.extensions.memory_watch.changes_that_fit`.

A run that ran out of memory (watch.py) starts this process. Its input is a pickled dictionary with the arguments
of `changes_that_fit`; it prints a title, and one change a line, or nothing.
"""

import pickle
import sys
from dataclasses import replace

from pretrain.config.layout import Layout
from pretrain.memory.compare.candidates import Candidate, generate_candidates
from pretrain.memory.compare.combinations import OFFLOADS, RECOMPUTE_CHOICES, Axes
from pretrain.memory.compare.compare import Workload, estimate_candidate
from pretrain.memory.footprint import with_unit
from pretrain.memory.hardware import make_cluster
from pretrain.model.description import ModelConfig
from pretrain.model.recompute import Recompute

_MAX_CHANGES = 3


def changes_that_fit(layout: Layout, model: ModelConfig, *, ranks_per_node: int, budget_bytes: int) -> list[str]:
    """Describe at most three changes of the layout that fit the budget, below a title.

    The fastest comes first; without predicted times, the fewest changes. A change is left out if an earlier one changes
    the same settings, or only some of them.
    """
    cluster = make_cluster(gpu=None, world_size=layout.world_size, nodes=None,
                           gpus_per_node=ranks_per_node if layout.world_size % ranks_per_node == 0 else 1)
    workload = Workload.of(model, cluster)
    fitting = []
    for candidate in alternatives(layout, workload):
        row = estimate_candidate(candidate, workload)
        needed = row.estimate.needed_bytes
        if not candidate.rejection and needed <= budget_bytes:
            changed = differences(layout, candidate.layout)
            fitting.append((round(row.step_seconds, 6), len(changed), -needed, changed))
    chosen: list[dict[str, str]] = []
    lines = []
    for _, _, negative_needed, changed in sorted(fitting, key=lambda item: item[:3]):
        if changed and not any(earlier.keys() <= changed.keys() for earlier in chosen) and len(chosen) < _MAX_CHANGES:
            chosen.append(changed)
            lines.append(f"  {', '.join(changed.values())}: {with_unit(-negative_needed)}")
    first = "the fastest" if workload.estimates else "the fewest"
    return [f"changes that are predicted to fit, {first} first:", *lines] if lines else []


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
    kept = {name: getattr(layout, name) for name in ("optimizer", "optimizer_moments", "device_kind", "overlap_comm")}
    candidates = generate_candidates(axes, workload.cluster, workload.model,
                                     document_attention=layout.document_attention).candidates
    return [replace(candidate, layout=replace(candidate.layout, **kept)) for candidate in candidates]


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
    """Return the keys and flags that change the recomputation from the old layout's to the new layout's."""
    if new.recompute != "none":
        return f"--recompute {new.recompute}"
    settings = []
    if new.activation_checkpoint_interval != old.activation_checkpoint_interval and old.recompute != "blocks":
        settings.append(f'"pipeline": {{"activation_checkpoint_interval": {new.activation_checkpoint_interval}}}')
        settings += ["without --recompute"] if old.recompute != "none" else []
    if new.offload_activations and not old.offload_activations:
        settings.append('"activation_checkpointing": {"cpu_checkpointing": true}')
    return " and ".join(settings) or "--recompute blocks"


if __name__ == "__main__":
    for line in changes_that_fit(**pickle.load(sys.stdin.buffer)):
        print(line)
