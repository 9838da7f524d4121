"""The health of one rank's device and of one host's disk. What fails is a complaint, in words; nothing raises."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from pretrain.checkpoint.format.files import free_bytes

_PIECE_BYTES = 2**26
_LARGEST_SUM = 256  # integers up to here are exact in bf16
_REPETITIONS = 5
_PATTERNS = (0x55555555, -0x55555556)  # 0101..., 1010...


@dataclass(frozen=True)
class DeviceHealth:
    """One rank's device."""

    product_tflops: float  # of matrix products
    free_memory_bytes: int  # before the test
    memory_gb_per_s: float  # of filling memory
    complaints: tuple[str, ...]


@dataclass(frozen=True)
class DiskHealth:
    """The file system of one host's checkpoint folder."""

    write_mb_per_s: float  # with fsync, while all hosts write
    free_bytes: int
    complaints: tuple[str, ...]


def device_health(size: int, memory_bytes: int | None) -> DeviceHealth:
    """Multiply `size` x `size` matrices; fill `memory_bytes` and read them back (None: see `_block_bytes`)."""
    accelerator = get_accelerator()
    free = int(accelerator.available_memory())
    tflops, complaints = _products(size)
    block = _block_bytes(free) if memory_bytes is None else memory_bytes
    if block > free:
        return DeviceHealth(tflops, free, 0.0, (*complaints, f"{free / 2**20:,.0f} MiB of memory are free; expected "
                                                             f"the {block / 2**20:,.0f} MiB of the test"))
    gb_per_s, found = _memory(block)
    return DeviceHealth(tflops, free, gb_per_s, (*complaints, *found))


def _block_bytes(free: int) -> int:
    """Most of an accelerator's memory, for a bad page anywhere; little of a host's, which other ranks share."""
    return min(free // 4, 2**28) if get_accelerator().device_name() == "cpu" else free * 8 // 10


def _products(size: int) -> tuple[float, tuple[str, ...]]:
    """(TFLOP/s, complaints). Small integers make every sum exact in every precision, so any difference is an error."""
    accelerator = get_accelerator()
    dtype = torch.float32 if accelerator.device_name() == "cpu" else torch.bfloat16
    share = min(1.0, _LARGEST_SUM / 8 / size**0.5)  # of entries that are not 0: a sum has a deviation of 32 at most
    numbers = torch.Generator().manual_seed(size)
    left, right = ((torch.randint(0, 2, (size, size), generator=numbers) * 2.0 - 1.0)
                   * (torch.rand(size, size, generator=numbers) < share) for _ in range(2))
    vector = torch.randint(-8, 9, (size, 1), generator=numbers).double()
    expected = left.double() @ (right.double() @ vector)
    device = accelerator.current_device_name()
    a, b = left.to(device, dtype), right.to(device, dtype)
    times, wrong = [], 0
    for _ in range(_REPETITIONS + 1):  # the first one warms up
        accelerator.synchronize()
        start = time.perf_counter()
        product = a @ b
        accelerator.synchronize()
        times.append(time.perf_counter() - start)
        wrong += not torch.equal(product.cpu().double() @ vector, expected)
    complaints = (f"wrong matrix product in {wrong} of {len(times)}",) if wrong else ()
    return 2 * size**3 / min(times[1:]) / 1e12, complaints


def _memory(num_bytes: int) -> tuple[float, tuple[str, ...]]:
    """(GB/s of filling, complaints) of a block that is filled with two patterns and read back."""
    accelerator = get_accelerator()
    try:
        pieces = [torch.zeros(min(_PIECE_BYTES, num_bytes - start) // 4, dtype=torch.int32,
                              device=accelerator.current_device_name())
                  for start in range(0, num_bytes, _PIECE_BYTES)]
    except RuntimeError as error:
        return 0.0, (f"no {num_bytes / 2**20:,.0f} MiB of memory: {str(error).splitlines()[0]}",)
    wrong, seconds = 0, []
    for pattern in _PATTERNS * 2:
        accelerator.synchronize()
        start = time.perf_counter()
        for piece in pieces:
            piece.fill_(pattern)
        accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
        wrong += sum(int((piece != pattern).sum()) for piece in pieces)
    complaints = (f"{wrong} words of memory lost what was written",) if wrong else ()
    del pieces
    accelerator.empty_cache()
    return num_bytes / min(seconds) / 1e9, complaints


def disk_health(folder: Path, num_bytes: int, needed_bytes: int) -> DiskHealth:
    """Write, sync and read back a file of `num_bytes` that has no name; judge the free space (0: nothing needed)."""
    free = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = free_bytes(folder)
        mb_per_s, complaints = _write_and_read(folder, num_bytes)
    except OSError as error:
        return DiskHealth(0.0, free, (f"{folder}: {error.strerror or error}",))
    if free < needed_bytes:
        complaints += (f"{folder}: {free / 1e9:,.3f} GB are free; expected {needed_bytes / 1e9:,.3f} GB, a checkpoint",)
    return DiskHealth(mb_per_s, free, complaints)


def _write_and_read(folder: Path, num_bytes: int) -> tuple[float, tuple[str, ...]]:
    """(MB/s, complaints). Raises OSError."""
    piece = os.urandom(min(num_bytes, 2**20))
    count = max(num_bytes // len(piece), 1)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # gone when this process is, however it ends
        start = time.perf_counter()
        for _ in range(count):
            if file.write(piece) != len(piece):
                raise OSError(None, "no space left on device")
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is read, not the cache
        file.seek(0)
        wrong = sum(file.read(len(piece)) != piece for _ in range(count))
    complaints = (f"{folder}: {wrong} of {count} MiB written came back changed",) if wrong else ()
    return count * len(piece) / seconds / 1e6, complaints
