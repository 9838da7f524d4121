"""Test one rank's device and one host's disk. Failures are returned as texts in `problems`, not raised."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from pretrain.extensions.health.machine import disk_rates
from pretrain.paths import free_bytes

_PIECE_BYTES = 2**26  # size of the tensors that fill the memory
_MAX_EXACT_INTEGER = 256  # bf16 represents all integers up to 256 exactly
_REPETITIONS = 5  # repetitions of the matrix product, after one to warm up
_PATTERNS = (0x55555555, -0x55555556)  # bits 0101... and 1010...


@dataclass(frozen=True)
class DeviceHealth:
    """Measurements of one rank's device."""

    product_tflops: float  # speed of matrix products
    free_memory_bytes: int  # free before the test
    memory_gb_per_s: float  # speed of filling memory
    problems: tuple[str, ...]


@dataclass(frozen=True)
class DiskHealth:
    """Measurements of the file system of one host's checkpoint folder."""

    write_mb_per_s: float  # including fsync, while all hosts write
    free_bytes: int
    problems: tuple[str, ...]


def device_health(size: int, memory_bytes: int | None) -> DeviceHealth:
    """Test matrix products of `size` x `size`, and `memory_bytes` of memory (None: see `_default_block_bytes`)."""
    accelerator = get_accelerator()
    free = int(accelerator.available_memory())
    tflops, problems = _test_matrix_products(size)
    block = _default_block_bytes(free) if memory_bytes is None else memory_bytes
    if block > free:
        return DeviceHealth(tflops, free, 0.0, (*problems, f"only {free / 2**20:,.0f} MiB of memory are free; the test "
                                                           f"needs {block / 2**20:,.0f} MiB"))
    gb_per_s, memory_problems = _test_memory(block)
    return DeviceHealth(tflops, free, gb_per_s, (*problems, *memory_problems))


def _default_block_bytes(free: int) -> int:
    """Return the number of bytes to test: 80% of a GPU's free memory, so that bad pages are found.

    On CPUs, all ranks of a host share the memory: return at most 256 MiB.
    """
    return min(free // 4, 2**28) if get_accelerator().device_name() == "cpu" else free * 8 // 10


def _test_matrix_products(size: int) -> tuple[float, tuple[str, ...]]:
    """Test products of random matrices with entries -1, 0 and 1. Returns (TFLOP/s, problems).

    The entries of the product are integers with a standard deviation of at most 32. Such small integers are exact in
    bf16, so any difference from the expected result is a fault of the device.
    """
    accelerator = get_accelerator()
    dtype = torch.float32 if accelerator.device_name() == "cpu" else torch.bfloat16
    density = min(1.0, _MAX_EXACT_INTEGER / 8 / size**0.5)  # fraction of non-zero entries
    numbers = torch.Generator().manual_seed(size)
    left, right = ((torch.randint(0, 2, (size, size), generator=numbers) * 2.0 - 1.0)
                   * (torch.rand(size, size, generator=numbers) < density) for _ in range(2))
    vector = torch.randint(-8, 9, (size, 1), generator=numbers).double()
    expected = left.double() @ (right.double() @ vector)
    device = accelerator.current_device_name()
    a, b = left.to(device, dtype), right.to(device, dtype)
    times, wrong = [], 0
    for _ in range(_REPETITIONS + 1):  # the first repetition warms up
        accelerator.synchronize()
        start = time.perf_counter()
        product = a @ b
        accelerator.synchronize()
        times.append(time.perf_counter() - start)
        wrong += not torch.equal(product.cpu().double() @ vector, expected)
    problems = (f"wrong result in {wrong} of {len(times)} matrix products",) if wrong else ()
    return 2 * size**3 / min(times[1:]) / 1e12, problems


def _test_memory(num_bytes: int) -> tuple[float, tuple[str, ...]]:
    """Fill a block of memory with two patterns and read it back. Returns (GB/s of filling, problems)."""
    accelerator = get_accelerator()
    try:
        pieces = [torch.zeros(min(_PIECE_BYTES, num_bytes - start) // 4, dtype=torch.int32,
                              device=accelerator.current_device_name())
                  for start in range(0, num_bytes, _PIECE_BYTES)]
    except RuntimeError as error:
        return 0.0, (f"cannot allocate {num_bytes / 2**20:,.0f} MiB of memory: {str(error).splitlines()[0]}",)
    wrong, seconds = 0, []
    for pattern in _PATTERNS * 2:
        accelerator.synchronize()
        start = time.perf_counter()
        for piece in pieces:
            piece.fill_(pattern)
        accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
        wrong += sum(int((piece != pattern).sum()) for piece in pieces)
    problems = (f"faulty memory: {wrong} 32-bit words changed after they were written",) if wrong else ()
    del pieces
    accelerator.empty_cache()
    return num_bytes / min(seconds) / 1e9, problems


def disk_health(folder: Path, num_bytes: int, needed_bytes: int) -> DiskHealth:
    """Write, sync and read back a temporary file of `num_bytes`, and check that `needed_bytes` are free."""
    free = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = free_bytes(folder)
        bytes_per_s, _, wrong = disk_rates(folder, num_bytes)
    except OSError as error:
        return DiskHealth(0.0, free, (f"{folder}: {error.strerror or error}",))
    problems: tuple[str, ...] = (f"{folder}: {wrong} MiB read back differ from what was written",) if wrong else ()
    if free < needed_bytes:
        problems += (f"{folder}: only {free / 1e9:,.3f} GB are free; a checkpoint needs {needed_bytes / 1e9:,.3f} GB",)
    return DiskHealth(bytes_per_s / 1e6, free, problems)
