"""States and fixed buffers of one rank at ZeRO stage 3 (DeepSpeed 0.19.8), with optimizer or parameters on NVMe."""

from collections.abc import Iterable, Iterator, Sequence

from pretrain.config.layout import Layout
from pretrain.memory.estimate.rank import (
    Allocation,
    ParameterGroup,
    master_weight_bytes,
    optimizer_location,
    optimizer_states,
    unpinned_location,
)

_MIN_AIO_BYTES = 2**20  # swap_tensor/utils.py, MIN_AIO_BYTES
_AIO_ALIGNED_BYTES = 1024  # swap_tensor/utils.py, AIO_ALIGNED_BYTES


def zero3_states(groups: Sequence[ParameterGroup], layout: Layout) -> Iterator[Allocation]:
    """DeepSpeedZeroOptimizer_Stage3 (zero/stage3.py) and its partitioned parameters."""
    location = optimizer_location(layout)
    elements_of_rank = sum(sum(group.parts) for group in groups)
    yield ("gradients", location), elements_of_rank * layout.grad_accum_bytes  # grad_partitions_flat_buffer
    for group in groups:
        for elements in sub_group_sizes(group.parts, layout):
            yield from _sub_group_states(group, elements, layout)
        if layout.offload_optimizer == "nvme":
            yield ("gradients", "nvme"), swapped_gradients(group.parts, master_weight_bytes(layout), layout)
    yield from _parameters(groups, layout)
    yield from _buffers(groups, layout)


def sub_group_sizes(parts: Sequence[int], layout: Layout) -> list[int]:
    """Return the elements of each sub-group, the unit of optimizer steps and swaps.

    Source: zero/stage3.py, _create_fp16_sub_groups.

    Args:
        parts: elements of each parameter that one rank holds.
    """
    if layout.sub_group_size >= sum(parts):
        return [sum(parts)]
    found, current = [], 0
    for part in parts:
        current += part
        if current >= layout.sub_group_size:
            found.append(current)
            current = 0
    if current:
        found.append(current)
    return found


def _sub_group_states(group: ParameterGroup, elements: int, layout: Layout) -> Iterator[Allocation]:
    """Yield master weights and optimizer states of one sub-group. A sub-group that is large enough is on NVMe."""
    master = master_weight_bytes(layout)
    on_nvme = layout.offload_optimizer == "nvme" and is_swapped(elements * master, layout)
    size = aligned_bytes(elements * master, layout) if on_nvme else elements * master
    yield ("master_weights", "nvme" if on_nvme else unpinned_location(layout)), size
    for (role, location), states in optimizer_states(group, size // master, layout):
        yield (role, "nvme" if on_nvme else location), states
    if layout.offload_optimizer != "none" and not on_nvme:
        yield ("gradients", optimizer_location(layout)), elements * master


def _parameters(groups: Sequence[ParameterGroup], layout: Layout) -> Iterator[Allocation]:
    """Yield the partitioned parameters, the small parameters that stay gathered, and ZeRO++'s second partition.

    On the device, the partitions are one flat tensor. Offloaded, they are one pinned tensor per group.
    """
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
            persistent = _padded_persistent_elements(group, persistent_elements(groups, layout)[group], layout)
            yield ("parameters", "device"), persistent * element


def _parameters_on_nvme(group: ParameterGroup, held: int, layout: Layout) -> Iterator[Allocation]:
    """Yield the files of a group's parameters, and the host memory that swapping needs.

    Every part that is large enough has a file, even if the host keeps a copy. The host keeps sub-groups of up to
    `max_in_cpu` elements together, and all parts that are too small for a file. All other sub-groups are written
    through a buffer that has the sub-group's size on all ranks together (reserve_partitioned_swap_space is called with
    `ds_numel`).

    Args:
        held: elements of the group that `max_in_cpu` allows on the host.
    """
    element, kept, largest_written = layout.element_bytes, 0, 0
    yield ("parameters", "nvme"), sum(aligned_bytes(part * element, layout) for part in group.parts
                                      if is_swapped(part * element, layout))
    for elements in sub_group_sizes(group.parts, layout):
        if kept + elements > held:
            largest_written = max(largest_written, elements)
        kept += elements
    if largest_written:
        small = sum(part * element for part in group.parts if not is_swapped(part * element, layout))
        yield ("parameters", "pinned" if layout.offload_param_pinned else "host"), small
        yield ("buffers", "pinned"), aligned_bytes(largest_written * group.ranks * element, layout)


def persistent_elements(groups: Sequence[ParameterGroup], layout: Layout) -> dict[ParameterGroup, int]:
    """Return, for each group, the elements of small parameters that stay gathered on every rank.

    Source: zero/parameter_offload.py, mark_persistent_parameters.
    """
    total, found = 0, {}
    for group in groups:
        small = sum(size * count for size, count in group.counts.items() if size <= layout.param_persistence_threshold)
        kept = min(small, max(0, layout.model_persistence_threshold - total))
        total += kept
        found[group] = kept
    return found


def _padded_persistent_elements(group: ParameterGroup, kept: int, layout: Layout) -> int:
    """Return the elements allocated for `kept` elements of gathered small parameters.

    A gathered parameter consists of the parts of all ranks, each rounded up to a whole element
    (partition_parameters.py, _allgather_params_coalesced).
    """
    if not kept:
        return 0
    small = [(size, count) for size, count in group.counts.items() if size <= layout.param_persistence_threshold]
    padded = sum(-(-size // group.ranks) * group.ranks * count for size, count in small)
    return round(kept / sum(size * count for size, count in small) * padded)


def _buffers(groups: Sequence[ParameterGroup], layout: Layout) -> Iterator[Allocation]:
    """Yield the gradient bucket, and the pinned buffers between NVMe and the device (swap_tensor/)."""
    if layout.contiguous_gradients:
        yield ("buffers", "device"), layout.reduce_bucket_size * layout.element_bytes
    if layout.offload_optimizer == "nvme":
        largest = max(elements for group in groups for elements in sub_group_sizes(group.parts, layout))
        buffer = aligned_bytes(largest * master_weight_bytes(layout), layout)
        yield ("buffers", "pinned"), layout.offload_optimizer_buffer_count * buffer
    if layout.offload_param == "nvme":
        buffer = aligned_bytes(layout.offload_param_buffer_size * layout.element_bytes, layout)
        yield ("buffers", "pinned"), layout.offload_param_buffer_count * buffer


def _alignment_bytes(layout: Layout) -> int:
    """Return the unit of which the sizes of swap files and buffers are multiples."""
    return _AIO_ALIGNED_BYTES * layout.aio_intra_op_parallelism


def aligned_bytes(size_bytes: int, layout: Layout) -> int:
    """Return the size of the file, or of its buffer, for a tensor of `size_bytes`."""
    unit = _alignment_bytes(layout)
    return -(-size_bytes // unit) * unit


def is_swapped(size_bytes: int, layout: Layout) -> bool:
    """Return whether DeepSpeed writes a tensor of this size to a file; smaller tensors stay in memory."""
    return size_bytes >= max(_MIN_AIO_BYTES, layout.aio_block_bytes)


def swapped_gradients(parts: Iterable[int], element_bytes: int, layout: Layout) -> int:
    """Bytes of the gradient files: each large part, rounded down to the alignment.

    Source: swap_tensor/optimizer_utils.py, _adjust_for_misaligned_lengths.

    Args:
        parts: elements of each parameter that one rank holds.
        element_bytes: bytes of a gradient element that the optimizer is given.
    """
    unit = _alignment_bytes(layout)
    return sum(part * element_bytes // unit * unit for part in parts if is_swapped(part * element_bytes, layout))


def retained_gradients(parts: Iterable[int], element_bytes: int, layout: Layout) -> int:
    """Bytes of gradients that stay on the device between the last reduction and the optimizer step.

    A part stays if it is too small for a file, or if its size is not a multiple of the alignment. In the second case
    the remainder is not written. It is a view, which keeps the complete part allocated (zero/stage3.py,
    _offload_grad_partition_at_boundary; swap_tensor/optimizer_utils.py, _adjust_for_misaligned_lengths).

    Args:
        parts, element_bytes: as in `swapped_gradients`.
    """
    unit = _alignment_bytes(layout)
    sizes = (part * element_bytes for part in parts)
    return sum(size for size in sizes if size % unit or not is_swapped(size, layout))
