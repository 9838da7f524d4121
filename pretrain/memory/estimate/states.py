"""Model states and fixed buffers that one rank holds between two micro-batches.

These are the parameters, gradients, master weights, optimizer states and permanent buffers that DeepSpeed 0.19.8
allocates, padding included. There is one function for each optimizer wrapper; its docstring names the DeepSpeed file.
The numbers hold after the first step, when the optimizer states exist, and while gradients accumulate. `phases.py` adds
the memory that a step allocates and frees. The published formula (ZeRO, arXiv 1910.02054) is
`estimate_memory.paper_states`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from pretrain.config.layout import Layout
from pretrain.memory.estimate.rank import (
    Allocation,
    ParameterGroup,
    Rank,
    master_weight_bytes,
    optimizer_location,
    optimizer_states,
    optimizer_wrapper,
    reduces_gradients,
)
from pretrain.memory.estimate.states_zero3 import zero3_states
from pretrain.memory.footprint import Footprint
from pretrain.model.operator_memory import FP32


def states_of_rank(rank: Rank) -> Footprint:
    """Return the states and fixed buffers of one rank."""
    return Footprint.of(_allocations(rank))


def _allocations(rank: Rank) -> Iterator[Allocation]:
    groups, layout = rank.groups, rank.layout
    wrapper = optimizer_wrapper(layout)
    if wrapper == "zero3":
        return zero3_states(groups, layout)
    if wrapper == "zero12":
        return _zero12_states(groups, layout, rank.zero_rank)
    return _bf16_optimizer_states(groups, layout) if wrapper == "bf16" else _undivided_states(groups, layout)


def pinning_loss(rank: Rank) -> int:
    """Bytes of pinned host memory that torch allocates beyond the tensors' sizes.

    torch's allocator rounds each tensor up to a power of two (ATen/core/CachingHostAllocator.h; read, not measured).
    DeepSpeed allocates the buffers for NVMe itself, without rounding.
    """
    pinned = [size for (role, location), size in _allocations(rank)
              if location == "pinned" and size and not (role == "buffers" and rank.layout.zero_stage == 3)]
    return sum((1 << (size - 1).bit_length()) - size for size in pinned)


def padded_size(group: ParameterGroup, layout: Layout) -> int:
    """Return the elements of a group's flat tensor at ZeRO stages 1 and 2 and under BF16_Optimizer.

    The size is a multiple of 2 * ranks (zero/stage_1_and_2.py, nccl_start_alignment_factor). With
    `parameter_alignment` there are also gaps between parameters: each one starts at a multiple of 16 bytes.
    """
    elements = group.size
    if layout.parameter_alignment and optimizer_wrapper(layout) == "zero12":
        step = 16 // layout.element_bytes
        elements = sum(-(-size // step) * step for size in group.sizes[:-1]) + group.sizes[-1]
    unit = 2 * group.ranks
    return -(-elements // unit) * unit


def overlapping_elements(group: ParameterGroup, layout: Layout, zero_rank: int) -> int:
    """Return the elements of all parameters that lie, fully or partly, in a rank's part of the flat tensor."""
    first, end = _overlapping_parameters(group, layout, zero_rank)
    return group.ends[end - 1] - (group.ends[first - 1] if first else 0) if first < end else 0


def _overlapping_parameters(group: ParameterGroup, layout: Layout, zero_rank: int) -> tuple[int, int]:
    """Return (first, end): the parameters first to end - 1 overlap a rank's part of the flat tensor."""
    part = padded_size(group, layout) // group.ranks
    first, last = bisect_right(group.ends, zero_rank * part), bisect_left(group.ends, (zero_rank + 1) * part)
    return first, min(last + 1, len(group.ends))


def _zero12_states(groups: Sequence[ParameterGroup], layout: Layout, zero_rank: int) -> Iterator[Allocation]:
    """DeepSpeedZeroOptimizer (zero/stage_1_and_2.py): flat 16-bit parameters, this rank's part of them in fp32."""
    location, element = optimizer_location(layout), layout.element_bytes
    for group in groups:
        flat = padded_size(group, layout)
        part = flat // group.ranks
        yield ("parameters", "device"), flat * element
        yield ("master_weights", location), part * master_weight_bytes(layout)
        yield from optimizer_states(group, part, layout)
        yield from _zero12_gradients(group, layout, part, zero_rank % group.ranks)
        if layout.offload_optimizer != "none":  # param_buffer_of_bit16_for_cpu_offload_groups
            yield ("gradients", location), part * master_weight_bytes(layout)
            yield ("buffers", location), part * element
    if layout.zero_stage == 1:  # ZeRO stage 2 frees its buckets after each micro-batch
        yield ("buffers", "device"), reduce_buckets_bytes(layout)
    if layout.offload_optimizer != "none":  # temp_grad_buffer_for_gpu_offload, temp_grad_buffer_for_cpu_offload
        largest = max(group.largest for group in groups) * element
        yield ("buffers", "device"), largest
        yield ("buffers", location), largest


def reduce_buckets_bytes(layout: Layout) -> int:
    """Bytes of the buffers in which ZeRO stages 1 and 2 reduce gradients (setup_buckets).

    There are two buffers if the reduction overlaps with the backward pass, otherwise one.
    """
    if not (layout.contiguous_gradients or layout.offload_optimizer != "none") or not reduces_gradients(layout):
        return 0
    element = layout.grad_accum_bytes if layout.zero_stage == 1 else layout.element_bytes
    return layout.reduce_bucket_size * element * (2 if layout.overlap_comm else 1)


def _zero12_gradients(group: ParameterGroup, layout: Layout, part: int, zero_rank: int) -> Iterator[Allocation]:
    """Yield the accumulated gradients of one group.

    ZeRO stage 1 keeps all gradients until the last micro-batch, in `param.grad`, or in `param.grad_accum` if they
    accumulate in another dtype. ZeRO stage 2 keeps the complete gradients of every parameter that overlaps this rank's
    part. There are two exceptions: gradients that accumulate in another dtype are kept for this rank's part only
    (`_use_compact_grad_partition_buffer`), and with an offloaded optimizer the sums are on the host
    (`accumulated_grads_in_cpu`).
    """
    converts = layout.grad_accum_bytes != layout.element_bytes
    if layout.zero_stage == 1:
        yield ("gradients", "device"), group.size * layout.grad_accum_bytes
    elif converts:
        yield ("gradients", "device"), part * layout.grad_accum_bytes
    elif layout.offload_optimizer == "none":
        yield ("gradients", "device"), overlapping_elements(group, layout, zero_rank) * layout.element_bytes
    elif layout.gradient_accumulation_steps > 1 and not layout.masters_in_16bit:
        for size in group.sizes[slice(*_overlapping_parameters(group, layout, zero_rank))]:
            yield ("gradients", optimizer_location(layout)), size * layout.element_bytes


def _bf16_optimizer_states(groups: Iterable[ParameterGroup], layout: Layout) -> Iterator[Allocation]:
    """BF16_Optimizer (runtime/bf16_optimizer.py): the bf16 gradients of the backward pass, and a flat sum of them."""
    for group in groups:
        flat = padded_size(group, layout)
        part = flat // group.ranks
        yield ("parameters", "device"), flat * layout.element_bytes
        yield ("master_weights", "device"), part * FP32
        yield from optimizer_states(group, part, layout)
        yield ("gradients", "device"), group.size * layout.element_bytes
        yield ("gradients", "device"), flat * layout.grad_accum_bytes


def _undivided_states(groups: Iterable[ParameterGroup], layout: Layout) -> Iterator[Allocation]:
    """ZeRO stage 0 in fp16 (fp16/fused_optimizer.py) or fp32: every rank holds all states. fp32 has no master weights.
    """
    for group in groups:
        elements = group.size
        yield ("parameters", "device"), elements * layout.element_bytes
        if layout.precision != "fp32":
            yield ("master_weights", "device"), elements * FP32
        yield from optimizer_states(group, elements, layout)
        yield ("gradients", "device"), elements * layout.element_bytes
