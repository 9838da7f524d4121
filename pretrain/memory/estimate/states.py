"""What a rank holds between two micro-batches: parameters, gradients, master weights, optimizer states, fixed buffers.

Exactly what DeepSpeed 0.19.8 allocates, with its padding; one function for each of its optimizers, named by the file
that it was read from. "Between two micro-batches" of a step after the first: gradients are being accumulated, and the
optimizer has its states. What comes and goes within a step is in `phases.py`.

The published formula (ZeRO, arXiv 1910.02054) is `rank_memory.paper_states`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from pretrain.config.layout import Layout
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.nvme import aligned, swapped_gradients, swaps
from pretrain.memory.estimate.pipeline_stages import Group, rank_groups
from pretrain.memory.footprint import Footprint

Part = tuple[tuple[str, str], int]  # ((role, place), bytes)

_FP32 = 4


def engine_kind(layout: Layout) -> str:
    """Which of DeepSpeed's optimizers runs this layout (runtime/engine.py, _do_optimizer_sanity_check).

    "zero3", "zero12", "bf16" (BF16_Optimizer), "fp16" (FP16_Optimizer), or "plain" (the optimizer proper: fp32,
    stage 0). bf16 at stage 0 runs as a PipelineModule here, which gives it BF16_Optimizer.
    """
    if layout.zero_stage == 3:
        return "zero3"
    if layout.uses_bf16_optimizer:
        return "bf16"
    if layout.zero_stage > 0:
        return "zero12"
    return "fp16" if layout.precision == "fp16" else "plain"


def states_of_rank(shape: ModelShape, layout: Layout, *, pipeline_stage: int = 0, zero_rank: int = 0) -> Footprint:
    """States and fixed buffers of one rank.

    Args:
        stage: its pipeline stage.
        zero_rank: its place among the ranks that ZeRO divides over.
    """
    return Footprint.of(_parts(rank_groups(shape, layout, pipeline_stage), layout, zero_rank))


def _parts(groups: Sequence[Group], layout: Layout, zero_rank: int) -> Iterator[Part]:
    kind = engine_kind(layout)
    if kind == "zero3":
        return _zero_3(groups, layout)
    if kind == "zero12":
        return _zero_1_and_2(groups, layout, zero_rank)
    return _bf16_optimizer(groups, layout) if kind == "bf16" else _undivided(groups, layout)


def pinning_loss(shape: ModelShape, layout: Layout, *, pipeline_stage: int = 0, zero_rank: int = 0) -> int:
    """Bytes of host memory lost to torch's allocator of pinned memory, which rounds each tensor up to a power of two
    (ATen/core/CachingHostAllocator.h; read, not measured). The buffers for NVMe are DeepSpeed's own, and exact.
    """
    pinned = [size for (role, place), size in _parts(rank_groups(shape, layout, pipeline_stage), layout, zero_rank)
              if place == "pinned" and size and not (role == "buffers" and layout.zero_stage == 3)]
    return sum((1 << (size - 1).bit_length()) - size for size in pinned)


def optimizer_place(layout: Layout) -> str:
    """Where an offloaded optimizer's tensors lie that DeepSpeed pins if `pin_memory` says so."""
    if layout.offload_optimizer == "none":
        return "device"
    return "pinned" if layout.offload_optimizer_pinned else "host"


def _unpinned(layout: Layout) -> str:
    """Where those lie that it never pins: CPU Adam's moments, and ZeRO-3's master weights (converted after pinning)."""
    return "device" if layout.offload_optimizer == "none" else "host"


def master_bytes(layout: Layout) -> int:
    """Of an element of the optimizer's own weights and of its gradient."""
    return layout.element_bytes if layout.masters_in_16bit else _FP32


def moment_bytes(layout: Layout) -> int:
    """Of the optimizer's states of one element. DeepSpeed's Lion on the CPU allocates Adam's two tensors
    (ops/lion/cpu_lion.py). Muon: see `_moments`."""
    moments = layout.optimizer_moments + (layout.optimizer == "lion" and layout.offload_optimizer != "none")
    return moments * (2 if layout.moments_in_16bit else _FP32)


def _moments(group: Group, part: int, layout: Layout) -> Iterator[Part]:
    """Optimizer states of `part` elements of a group. Muon keeps its momentum in the gradients' dtype, and the next one
    beside it until the step is known to be sound (`_muon_pending_momentum`); embeddings, head and vectors have Adam.
    """
    if layout.optimizer != "muon":
        yield ("optimizer_states", _unpinned(layout)), part * moment_bytes(layout)
        return
    inner = round(part * group.inner_size / group.size)
    momentum = inner * layout.grad_accum_bytes
    yield ("optimizer_states", _unpinned(layout)), momentum + (part - inner) * 2 * _FP32
    if layout.zero_stage < 3 and layout.offload_optimizer == "none":
        yield ("buffers", "device"), momentum


def padded(group: Group, layout: Layout) -> int:
    """Elements of the flat tensor of a group at stages 1 and 2 and under BF16_Optimizer: a multiple of 2 x ranks
    (zero/stage_1_and_2.py, nccl_start_alignment_factor), with gaps where parameters are to start at 16 bytes.
    """
    elements = group.size
    if layout.parameter_alignment and engine_kind(layout) == "zero12":
        step = 16 // layout.element_bytes
        elements = sum(-(-size // step) * step for size in group.sizes[:-1]) + group.sizes[-1]
    unit = 2 * group.ranks
    return -(-elements // unit) * unit


def elements_touched(group: Group, layout: Layout, rank: int) -> int:
    """Elements of all parameters that lie, wholly or in part, in a rank's part of the flat tensor."""
    first, last = _touched(group, layout, rank)
    return group.ends[last - 1] - (group.ends[first - 1] if first else 0) if first < last else 0


def _touched(group: Group, layout: Layout, rank: int) -> tuple[int, int]:
    """Those parameters: the index of the first, and of the first after them."""
    part = padded(group, layout) // group.ranks
    first, last = bisect_right(group.ends, rank * part), bisect_left(group.ends, (rank + 1) * part)
    return first, min(last + 1, len(group.ends))


def _zero_1_and_2(groups: Sequence[Group], layout: Layout, rank: int) -> Iterator[Part]:
    """DeepSpeedZeroOptimizer (zero/stage_1_and_2.py): flat 16-bit parameters, this rank's part in fp32."""
    place, element = optimizer_place(layout), layout.element_bytes
    for group in groups:
        flat = padded(group, layout)
        part = flat // group.ranks
        yield ("parameters", "device"), flat * element
        yield ("master_weights", place), part * master_bytes(layout)
        yield from _moments(group, part, layout)
        yield from _gradients_1_and_2(group, layout, part, rank % group.ranks)
        if layout.offload_optimizer != "none":  # param_buffer_of_bit16_for_cpu_offload_groups
            yield ("gradients", place), part * master_bytes(layout)
            yield ("buffers", place), part * element
    if layout.zero_stage == 1:  # at stage 2 it goes after each micro-batch
        yield ("buffers", "device"), bucket_bytes(layout)
    if layout.offload_optimizer != "none":  # temp_grad_buffer_for_gpu_offload, ..._cpu_offload
        largest = max(group.largest for group in groups) * element
        yield ("buffers", "device"), largest
        yield ("buffers", place), largest


def bucket_bytes(layout: Layout) -> int:
    """Of the buffers that gradients are reduced in at stages 1 and 2, two where that overlaps with the backward pass
    (setup_buckets)."""
    if not (layout.contiguous_gradients or layout.offload_optimizer != "none"):
        return 0
    element = layout.grad_accum_bytes if layout.zero_stage == 1 else layout.element_bytes
    return layout.reduce_bucket_size * element * (2 if layout.overlap_comm else 1)


def _gradients_1_and_2(group: Group, layout: Layout, part: int, rank: int) -> Iterator[Part]:
    """Accumulated gradients. Stage 1 keeps all of them until the last micro-batch, in `param.grad` or, if they have
    another dtype, in `param.grad_accum`. Stage 2 keeps those of the parameters in its part; if they are fp32 only its
    part (`_use_compact_grad_partition_buffer`); offloaded, the sums lie on the host (`accumulated_grads_in_cpu`).
    """
    another_dtype = layout.grad_accum_bytes != layout.element_bytes
    if layout.zero_stage == 1:
        yield ("gradients", "device"), group.size * layout.grad_accum_bytes
    elif another_dtype:
        yield ("gradients", "device"), part * layout.grad_accum_bytes
    elif layout.offload_optimizer == "none":
        yield ("gradients", "device"), elements_touched(group, layout, rank) * layout.element_bytes
    elif layout.gradient_accumulation_steps > 1 and not layout.masters_in_16bit:
        for size in group.sizes[slice(*_touched(group, layout, rank))]:
            yield ("gradients", optimizer_place(layout)), size * layout.element_bytes


def _bf16_optimizer(groups: Iterable[Group], layout: Layout) -> Iterator[Part]:
    """BF16_Optimizer (runtime/bf16_optimizer.py): bf16 gradients as backward makes them, and a flat sum of them all."""
    for group in groups:
        flat = padded(group, layout)
        part = flat // group.ranks
        yield ("parameters", "device"), flat * layout.element_bytes
        yield ("master_weights", "device"), part * _FP32
        yield from _moments(group, part, layout)
        yield ("gradients", "device"), group.size * layout.element_bytes
        yield ("gradients", "device"), flat * layout.grad_accum_bytes


def _undivided(groups: Iterable[Group], layout: Layout) -> Iterator[Part]:
    """Stage 0 in fp16 (fp16/fused_optimizer.py) or fp32: everything whole on each rank; fp32 has no second copy."""
    for group in groups:
        elements = group.size
        yield ("parameters", "device"), elements * layout.element_bytes
        yield ("master_weights", "device"), elements * _FP32 * (layout.precision != "fp32")
        yield from _moments(group, elements, layout)
        yield ("gradients", "device"), elements * layout.element_bytes


def sub_groups(parts: Sequence[int], layout: Layout) -> list[int]:
    """Elements of each sub-group, the unit of steps and swaps (zero/stage3.py, _create_fp16_sub_groups)."""
    if layout.sub_group_size >= sum(parts):
        return [sum(parts)]
    found, current = [], 0
    for part in parts:
        current += part
        if current >= layout.sub_group_size:
            found.append(current)
            current = 0
    return found + [current] * (current > 0)


def _zero_3(groups: Sequence[Group], layout: Layout) -> Iterator[Part]:
    """DeepSpeedZeroOptimizer_Stage3 (zero/stage3.py) and its partitioned parameters."""
    place, unpinned = optimizer_place(layout), _unpinned(layout)
    offloaded, master = layout.offload_optimizer != "none", master_bytes(layout)
    whole = sum(sum(group.parts) for group in groups)
    yield ("gradients", place), whole * layout.grad_accum_bytes  # grad_partitions_flat_buffer
    for group in groups:
        parts = group.parts
        for elements in sub_groups(parts, layout):
            on_nvme = layout.offload_optimizer == "nvme" and swaps(elements * master, layout)
            size = aligned(elements * master, layout) if on_nvme else elements * master
            yield ("master_weights", "nvme" if on_nvme else unpinned), size
            for (role, own_place), states in _moments(group, size // master, layout):
                yield (role, "nvme" if on_nvme else own_place), states
            if offloaded and not on_nvme:
                yield ("gradients", place), elements * master
        if layout.offload_optimizer == "nvme":
            yield ("gradients", "nvme"), swapped_gradients(parts, master, layout)
    yield from _zero_3_parameters(groups, layout)
    yield from _zero_3_buffers(groups, layout)


def _zero_3_parameters(groups: Sequence[Group], layout: Layout) -> Iterator[Part]:
    """Partitions in one flat tensor, offloaded a pinned one a group; small parameters whole too; ZeRO++'s copy."""
    element, in_cpu = layout.element_bytes, 0
    for group in groups:
        held = sum(group.parts)
        if layout.offload_param == "nvme":
            held = min(held, max(0, layout.offload_param_max_in_cpu - in_cpu))
            in_cpu += sum(group.parts)
            yield from _parameters_on_nvme(group, held, layout)
        yield ("parameters", "device" if layout.offload_param == "none" else "pinned"), held * element
        if layout.hpz_partition_size > 1:
            second = sum(-(-size // layout.hpz_partition_size) for size in group.sizes)
            yield ("parameters", "device"), second * element
        if group.ranks > 1 or (layout.offload_param != "none" and layout.device_kind != "cpu"):
            kept = _padded_persistent(group, persistent(groups, layout)[group], layout)
            yield ("parameters", "device"), kept * element


def _parameters_on_nvme(group: Group, held: int, layout: Layout) -> Iterator[Part]:
    """Each part that is large enough has a file, also if the host keeps it. The host keeps the first `max_in_cpu`
    elements, by whole sub-groups, and all parts too small for a file; a sub-group that it does not keep is written
    through a buffer of the size that it has over all ranks (reserve_partitioned_swap_space is given `ds_numel`).
    """
    element, kept, written = layout.element_bytes, 0, 0
    yield ("parameters", "nvme"), sum(aligned(part * element, layout) for part in group.parts
                                      if swaps(part * element, layout))
    for elements in sub_groups(group.parts, layout):
        written = max(written, elements if kept + elements > held else 0)
        kept += elements
    if written:
        small = sum(part * element for part in group.parts if not swaps(part * element, layout))
        yield ("parameters", "pinned" if layout.offload_param_pinned else "host"), small
        yield ("buffers", "pinned"), aligned(written * group.ranks * element, layout)


def persistent(groups: Sequence[Group], layout: Layout) -> dict[Group, int]:
    """Elements by group of the parameters that are small enough to stay whole on every rank
    (zero/parameter_offload.py, mark_persistent_parameters).
    """
    total, found = 0, {}
    for group in groups:
        small = sum(size for size in group.sizes if size <= layout.param_persistence_threshold)
        kept = min(small, max(0, layout.model_persistence_threshold - total))
        total += kept
        found[group] = kept
    return found


def _padded_persistent(group: Group, kept: int, layout: Layout) -> int:
    """Elements of what holds `kept` elements of small parameters whole: the parts of all ranks, which have an element
    each at least (partition_parameters.py, _allgather_params_coalesced)."""
    small = [size for size in group.sizes if size <= layout.param_persistence_threshold]
    return round(kept / sum(small) * sum(-(-size // group.ranks) * group.ranks for size in small)) if kept else 0


def _zero_3_buffers(groups: Sequence[Group], layout: Layout) -> Iterator[Part]:
    """The gradient bucket, and what NVMe is read and written through (swap_tensor/)."""
    if layout.contiguous_gradients:
        yield ("buffers", "device"), layout.reduce_bucket_size * layout.element_bytes
    if layout.offload_optimizer == "nvme":
        largest = max(elements for group in groups for elements in sub_groups(group.parts, layout))
        buffer = aligned(largest * master_bytes(layout), layout)
        yield ("buffers", "pinned"), layout.offload_optimizer_buffer_count * buffer
    if layout.offload_param == "nvme":
        buffer = aligned(layout.offload_param_buffer_size * layout.element_bytes, layout)
        yield ("buffers", "pinned"), layout.offload_param_buffer_count * buffer
