"""What the machine can do, as contenders: matrix products, and the disk that offload uses."""

import itertools
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from pretrain.bench.processes.baseline_job import Job
from pretrain.bench.processes.request_loop import Rounds

_PRODUCT_S = 1.0  # of products a round
_DISK_BYTES = 256 * 2**20  # a transfer
BLOCK_SIZES = (128 * 2**10, 2**20, 8 * 2**20)  # bytes
QUEUE_DEPTHS = (8, 32, 128)
THREADS = (1, 2, 4)


def products(job: Job, rounds: Rounds) -> NoReturn:
    """The best rate of square matrix products in the training's precision: 2 n^3 FLOPs each. The limit of MFU."""
    device = "cuda" if job.device_kind == "cuda" else "cpu"
    dtype = torch.bfloat16 if job.option("precision") == "bf16" else torch.float32
    size = job.option("product_size")
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    rounds.built(0)
    while True:
        begin, best = time.perf_counter(), float("inf")
        while time.perf_counter() - begin < _PRODUCT_S:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            rounds.synchronize()
            best = min(best, time.perf_counter() - start)
        rounds.end_round(tflops=2 * size**3 / best / 1e12)


def disk(job: Job, rounds: Rounds) -> NoReturn:
    """DeepSpeed's own aio handle, as its swapper uses it, with each of the settings in turn.

    (DeepSpeed's `ds_nvme_tune` measures the same in a process a setting, 5 to 10 s each, and prints keys that its JSON
    does not take.)
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from pretrain.engine.build_ops import missing_operator
    from pretrain.errors import ConfigError

    missing = missing_operator("AsyncIOBuilder")
    if missing:
        raise ConfigError("DeepSpeed's async_io operator", found=missing, expected="it",
                          remedy="launch/setup.sh --offload")
    operator = AsyncIOBuilder().load(verbose=False)
    path = Path(job.option("nvme_path"), "ds-pretrain-bench.bin")
    buffer = operator.aio_handle(2**20, 8, False, True, 1).new_cpu_locked_tensor(_DISK_BYTES, torch.empty(
        0, dtype=torch.uint8))
    buffer.fill_(1)
    try:
        rounds.built(0)
        while True:
            rounds.end_round(settings=[_transfer(operator, buffer, path, *setting) for setting in
                                       itertools.product(BLOCK_SIZES, QUEUE_DEPTHS, THREADS)])
    finally:
        path.unlink(missing_ok=True)


def _transfer(operator: Any, buffer: torch.Tensor, path: Path, block_size: int, queue_depth: int,
              threads: int) -> dict[str, Any]:
    """Write the buffer to the file and read it back: bytes a second of each."""
    handle = operator.aio_handle(block_size, queue_depth, False, True, threads)
    rates = {}
    for name, transfer in (("write", handle.sync_pwrite), ("read", handle.sync_pread)):
        start = time.perf_counter()
        transfer(buffer, str(path), 0)
        rates[f"{name}_bytes_per_s"] = buffer.nbytes / (time.perf_counter() - start)
    return {"block_size": block_size, "queue_depth": queue_depth, "intra_op_parallelism": threads, **rates}
