"""What reduction and optimizer step need beside the states: two of the moments of `phases.py`."""

from pretrain.config.layout import Layout
from pretrain.memory.estimate.pipeline_stages import pipeline_stage_layers
from pretrain.memory.estimate.rank import Rank
from pretrain.memory.estimate.states import (
    bucket_bytes,
    elements_touched,
    engine_kind,
    master_bytes,
    padded,
    sub_groups,
)
from pretrain.memory.footprint import Footprint

_FP32, _FP64 = 4, 8


def reduction(rank: Rank) -> Footprint:
    """Stage 1 copies the gradients of its part out of the bucket (`grads_in_partition`); offloaded, it does so only if
    they are accumulated in another dtype (`_use_compact_grad_partition_buffer`), and takes norms in fp64."""
    layout, groups = rank.layout, rank.groups()
    if layout.offload_optimizer != "none":
        another = layout.grad_accum_bytes != layout.element_bytes
        parts = sum(padded(group, layout) // group.ranks for group in groups) * layout.grad_accum_bytes * another
        norm = max(group.largest for group in groups) * _FP64
        return Footprint.of([(("gradients", "device"), parts), (("buffers", "device"), norm)])
    touched = sum(elements_touched(group, layout, rank.zero_rank % group.ranks) for group in groups)
    return Footprint.of([(("gradients", "device"), touched * layout.grad_accum_bytes)])


def optimizer_step(rank: Rank) -> Footprint:
    """The largest group's gradients as the optimizer takes them, and what is copied on the way there; by the time of
    the step stages 1 and 2 hold no gradients but those of this rank's part."""
    layout, kind, groups = rank.layout, engine_kind(rank.layout), rank.groups()
    if layout.offload_optimizer != "none":
        return Footprint()
    part = {
        "zero3": lambda: max(max(sub_groups(group.parts, layout)) for group in groups),
        "zero12": lambda: max(padded(group, layout) // group.ranks for group in groups),
        "bf16": lambda: max(padded(group, layout) // group.ranks for group in groups),
        "fp16": lambda: max(group.size for group in groups),
        "plain": lambda: max(group.size for group in groups),
    }[kind]()
    return Footprint.of([(("gradients", "device"), _given_gradients(rank, kind, part)),
                         (("buffers", "device"), _optimizer_work(layout, part))])


def _given_gradients(rank: Rank, kind: str, part: int) -> int:
    """Bytes of the copies of `part` gradients in the optimizer's dtype, less the gradients that are let go before."""
    layout = rank.layout
    if kind == "plain":
        return 0
    if kind == "fp16":
        flattened = 2 * part * _FP32  # after each is converted
        return max(flattened, _masked_norm(rank, part)) if _has_replica(rank) else flattened
    flat = kind == "bf16" or (kind == "zero12" and layout.grad_accum_bytes != layout.element_bytes)
    copied = 0 if flat else part * layout.grad_accum_bytes
    converted = part * master_bytes(layout) if layout.grad_accum_bytes != master_bytes(layout) else 0
    let_go = 0
    if kind == "zero12" and layout.zero_stage == 1:
        let_go = sum(group.size - elements_touched(group, layout, rank.zero_rank % group.ranks)
                     for group in rank.groups()) * layout.grad_accum_bytes + bucket_bytes(layout)
    return copied + converted - let_go


def _has_replica(rank: Rank) -> bool:
    """Whether the stage has a copy of the tied matrix whose gradient counts at the first stage."""
    layers = pipeline_stage_layers(rank.shape, rank.layout, rank.pipeline_stage)
    return rank.pipeline_stage > 0 and any(layer.tied for layer in layers)


def _masked_norm(rank: Rank, part: int) -> int:
    """Bytes of the norm of `part` gradients of which some do not count (runtime/utils.py, get_flattened_grad_norm): all
    gradients in fp32, instead of those in fp16, and zeros, their running sum and a mask."""
    total = sum(group.size for group in rank.groups())
    return total * (_FP32 - rank.layout.element_bytes) + part * (2 * _FP32 + 1)


def _optimizer_work(layout: Layout, part: int) -> int:
    """torch.optim.AdamW's denominators: on the CPU the root and its quotient, on CUDA ("foreach") one of them."""
    if not layout.torch_optimizer:
        return 0
    return part * master_bytes(layout) * (1 if layout.device_kind == "cuda" else 2)
