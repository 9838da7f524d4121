"""Gradients of weights in the phases of a step: in the backward pass, in the reduction, in the optimizer step.

`states.py` counts the gradients that exist between two micro-batches. These functions return the difference of a phase:
positive for gradients in addition, negative for gradients that do not exist yet. Read from DeepSpeed 0.19.8:
runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, runtime/fp16/fused_optimizer.py.
"""

from functools import lru_cache

from pretrain.config.layout import Layout
from pretrain.memory.estimate.rank import (
    ParameterGroup,
    Rank,
    local_size,
    master_weight_bytes,
    optimizer_wrapper,
    reduces_gradients,
)
from pretrain.memory.estimate.states import overlapping_elements, padded_size, reduce_buckets_bytes
from pretrain.memory.estimate.states_zero3 import retained_gradients, sub_group_sizes
from pretrain.memory.footprint import Footprint
from pretrain.model.description import Layer
from pretrain.model.operator_memory import FP32, offered

_FP64 = 8
_NORM_ELEMENTS = 250_000_000  # DeepSpeed computes a norm in pieces of this size (_constant_buffered_norm2)


def gradients_in_backward(rank: Rank, done: int, layers: tuple[Layer, ...] = (), *, accumulated: bool) -> Footprint:
    """Return the gradients during the backward pass of some layers, minus the gradients between two micro-batches.

    Args:
        done: elements of the pipeline stage's parameters whose gradients are already computed.
        layers: the current layers. Their largest gradient exists at the same time as the sum that it is added to.
        accumulated: whether gradients of earlier micro-batches exist.
    """
    layout, wrapper = rank.layout, optimizer_wrapper(rank.layout)
    element = layout.element_bytes
    largest = max((local_size(each, layout) for layer in layers for each in layer.parameters), default=0)
    missing = 0  # bytes
    if not accumulated and wrapper == "zero12" and layout.zero_stage == 2 and reduces_gradients(layout):
        missing = _zero2_gradients(rank) if not done else 0  # allocated at the first reduction
    elif not accumulated and wrapper != "zero3":
        total = sum(group.size for group in rank.groups)
        missing = max(0, total - done - largest) * element
        largest = 0
    tied = _tied_elements(rank) * element if done and (accumulated or layout.zero_stage > 1) else 0
    return Footprint.on_device(gradients=largest * element + tied - missing)


def _tied_elements(rank: Rank) -> int:
    """Elements of the matrix that head and embedding of one pipeline stage share.

    The head's gradient of this matrix remains allocated until the embedding's gradient is added to it.
    """
    tied = [layer for layer in rank.layers if layer.tied]
    return local_size(tied[0].parameters[0], rank.layout) if len(tied) > 1 else 0


def _zero2_gradients(rank: Rank) -> int:
    """Bytes of the gradients that ZeRO stage 2 keeps on the device: of parameters that overlap this rank's part."""
    layout = rank.layout
    if layout.offload_optimizer != "none" or layout.grad_accum_bytes != layout.element_bytes:
        return 0
    return _overlapping_elements(rank) * layout.element_bytes


def _overlapping_elements(rank: Rank) -> int:
    """Elements of all parameters that overlap this rank's parts of the groups' flat tensors."""
    return sum(overlapping_elements(group, rank.layout, rank.zero_rank % group.ranks) for group in rank.groups)


def reduction_in_backward(rank: Rank, done: int) -> Footprint:
    """Return the buffers and copies at ZeRO stages 2 and 3, from the first reduced gradients of a micro-batch on.

    - Stage 2: the buckets. If gradients accumulate, also this micro-batch's gradients of this rank's part
      (`grads_in_partition`), in addition to their sum.
    - Stage 3: the copy of the bucket that is reduced and scattered.
    - Sequence parallelism: see `_fp32_bucket`.
    - Offloaded optimizer: one gradient in fp64, for its norm (`_constant_buffered_norm2`,
      `set_norm_for_param_grad_in_gpu`).

    Args:
        done: elements of the pipeline stage's parameters whose gradients have been reduced.
    """
    layout, groups = rank.layout, rank.groups
    if layout.zero_stage < 2 or not done:
        return Footprint()
    if layout.zero_stage == 3:
        bucket = min(layout.reduce_bucket_size, sum(group.size for group in groups))
        buffers = bucket * layout.element_bytes + 2 * _fp32_bucket(rank, done)
        gradients = _retained_gradients(rank, done)
        largest = max(max(group.parts) for group in groups)
    else:
        buffers = reduce_buckets_bytes(layout) + _fp32_bucket(rank, done)
        gradients = _zero2_gradients(rank) if rank.accumulates else 0
        if not reduces_gradients(layout):  # they remain where the backward pass allocates them, one after the other
            gradients = min(gradients, done * layout.element_bytes)
        largest = max(group.largest for group in groups)
    if layout.offload_optimizer != "none":
        buffers += min(largest, _NORM_ELEMENTS) * _FP64
    elif layout.grad_accum_bytes != layout.element_bytes:  # converted before it is added to the sum
        buffers += largest * layout.grad_accum_bytes
    return Footprint.on_device(gradients=gradients, buffers=buffers)


def _fp32_bucket(rank: Rank, done: int) -> int:
    """Bytes of the bucket's fp32 copy, in which sequence parallelism reduces 16-bit gradients.

    It exists only while a bucket is reduced: as soon as one is full, or after the last gradient of the backward pass.
    """
    layout = rank.layout
    bucket = min(layout.reduce_bucket_size, sum(group.size for group in rank.groups))
    is_16bit = FP32 not in (layout.element_bytes, layout.grad_accum_bytes if layout.zero_stage == 1 else 0)
    return bucket * FP32 if layout.sequence_parallel_size > 1 and is_16bit and done >= bucket else 0


def _retained_gradients(rank: Rank, done: int) -> int:
    """Bytes of the gradients that cannot be written to NVMe yet; they grow with the reduced elements (`done`)."""
    layout, groups = rank.layout, rank.groups
    if layout.offload_optimizer != "nvme":
        return 0
    return round(_all_retained(groups, layout) * done / sum(group.size for group in groups))


@lru_cache(maxsize=16)
def _all_retained(groups: tuple[ParameterGroup, ...], layout: Layout) -> int:
    return sum(retained_gradients(group.parts, master_weight_bytes(layout), layout) for group in groups)


def gradients_in_reduction(rank: Rank) -> Footprint:
    """Return the copies that ZeRO stage 1 makes after the last micro-batch, in addition to gradients and buckets.

    The gradients of this rank's part are copied out of the bucket (`grads_in_partition`). With an offloaded optimizer
    they are copied only if gradients accumulate in another dtype (`_use_compact_grad_partition_buffer`), and each
    gradient is converted to fp64 for its norm.
    """
    layout, groups = rank.layout, rank.groups
    if not reduces_gradients(layout):
        return Footprint()
    if layout.offload_optimizer == "none":
        copy = _fp32_bucket(rank, sum(group.size for group in groups))
        return Footprint.on_device(gradients=_overlapping_elements(rank) * layout.grad_accum_bytes, buffers=copy)
    copied = 0
    if layout.grad_accum_bytes != layout.element_bytes:
        copied = sum(padded_size(group, layout) // group.ranks for group in groups) * layout.grad_accum_bytes
    norm = max(group.largest for group in groups) * _FP64
    return Footprint.on_device(gradients=copied, buffers=norm)


def gradients_in_optimizer_step(rank: Rank) -> Footprint:
    """Return the gradients and the working memory of the optimizer step of the largest group.

    The gradients count in the dtype that the optimizer is given, with all copies of the conversion. At this point ZeRO
    stages 1 and 2 hold only the gradients of this rank's part.
    """
    layout = rank.layout
    if layout.offload_optimizer != "none":
        return Footprint()
    elements = max(_step_elements(rank))
    return Footprint.on_device(gradients=_step_gradients(rank, elements), buffers=_adamw_work(layout, elements))


def _step_elements(rank: Rank) -> list[int]:
    """List the elements that the optimizer updates at once, for each group."""
    wrapper, groups, layout = optimizer_wrapper(rank.layout), rank.groups, rank.layout
    if wrapper == "zero3":
        return [max(sub_group_sizes(group.parts, layout)) for group in groups]
    if wrapper in ("zero12", "bf16"):
        return [padded_size(group, layout) // group.ranks for group in groups]
    return [group.size for group in groups]


def _step_gradients(rank: Rank, elements: int) -> int:
    """Bytes of the copies of `elements` gradients, less the bytes of gradients that are freed before the step."""
    layout, wrapper = rank.layout, optimizer_wrapper(rank.layout)
    if wrapper == "none":
        return 0
    if wrapper == "fp16":
        flattened = 2 * elements * FP32  # each gradient converted to fp32, then all of them in one flat tensor
        return max(flattened, _masked_norm(rank, elements)) if _has_tied_copy(rank) else flattened
    converts_sums = layout.grad_accum_bytes != layout.element_bytes
    is_flat = wrapper == "bf16" or (wrapper == "zero12" and converts_sums)
    update = offered(lambda memory: memory.update(layout)) if wrapper == "zero12" else None
    if update is not None:
        is_flat = is_flat or update.is_one_pass
        elements = elements if update.most_elements is None else min(elements, update.most_elements)
    copied = 0 if is_flat else elements * layout.grad_accum_bytes
    converted = 0
    if layout.grad_accum_bytes != master_weight_bytes(layout):
        converted = elements * master_weight_bytes(layout)
    freed = 0
    if wrapper == "zero12" and layout.zero_stage == 1:
        others = sum(group.size for group in rank.groups) - _overlapping_elements(rank)
        freed = others * layout.grad_accum_bytes + reduce_buckets_bytes(layout)
    return copied + converted - freed


def _has_tied_copy(rank: Rank) -> bool:
    """Return whether the rank holds a copy of the tied matrix whose gradient counts on the first pipeline stage."""
    return rank.pipeline_stage > 0 and any(layer.tied for layer in rank.layers)


def _masked_norm(rank: Rank, elements: int) -> int:
    """Bytes that computing a gradient norm takes if it excludes some gradients (runtime/utils.py,
    get_flattened_grad_norm).

    All gradients are converted to fp32. Three tensors of `elements` are allocated: fp32 zeros, an fp32 running sum and
    a one-byte mask.
    """
    total = sum(group.size for group in rank.groups)
    return total * (FP32 - rank.layout.element_bytes) + elements * (2 * FP32 + 1)


def _adamw_work(layout: Layout, elements: int) -> int:
    """Bytes of torch.optim.AdamW's denominators; DeepSpeed's kernels need none.

    On CUDA ("foreach") one tensor exists at a time. On a CPU two exist: the square root and its quotient.
    """
    if not layout.torch_optimizer:
        return 0
    tensors = 1 if layout.device_kind == "cuda" else 2
    return elements * master_weight_bytes(layout) * tensors
