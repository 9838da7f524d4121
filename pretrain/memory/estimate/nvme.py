"""What DeepSpeed 0.19.8 writes to NVMe, and what it keeps in memory all the same (runtime/swap_tensor/)."""

from collections.abc import Iterable

from pretrain.config.layout import Layout

_MIN_AIO_BYTES = 2**20  # swap_tensor/utils.py, MIN_AIO_BYTES
_AIO_ALIGNED_BYTES = 1024  # swap_tensor/utils.py, AIO_ALIGNED_BYTES


def unit_bytes(layout: Layout) -> int:
    """What sizes of files and buffers are multiples of."""
    return _AIO_ALIGNED_BYTES * layout.aio_intra_op_parallelism


def aligned(size_bytes: int, layout: Layout) -> int:
    """Bytes of a file, or of the buffer that it is read into."""
    return -(-size_bytes // unit_bytes(layout)) * unit_bytes(layout)


def swaps(size_bytes: int, layout: Layout) -> bool:
    """Whether a tensor is large enough for a file."""
    return size_bytes >= max(_MIN_AIO_BYTES, layout.aio_block_bytes)


def swapped_gradients(parts: Iterable[int], element_bytes: int, layout: Layout) -> int:
    """Bytes of gradient files, of each large part as far as it is aligned (optimizer_utils.py,
    _adjust_for_misaligned_lengths).

    Args:
        parts: elements of each parameter's part.
        element_bytes: of a gradient as the optimizer takes it.
    """
    unit = unit_bytes(layout)
    return sum(part * element_bytes // unit * unit for part in parts if swaps(part * element_bytes, layout))


def retained_gradients(parts: Iterable[int], element_bytes: int, layout: Layout) -> int:
    """Bytes of gradients on the device, between the last reduction and the step, of the parts that are too small for a
    file, or not aligned: the rest that stays in memory is a view of the whole (zero/stage3.py,
    _offload_grad_partition_at_boundary; optimizer_utils.py, _adjust_for_misaligned_lengths).
    """
    unit = unit_bytes(layout)
    sizes = (part * element_bytes for part in parts)
    return sum(size for size in sizes if size % unit or not swaps(size, layout))
