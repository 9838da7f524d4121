"""Baselines that measure the machine's limits: the rate of matrix products, and the disk that NVMe offload uses."""

import itertools
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.request_loop import RequestLoop

_REPETITION_S = 1.0  # duration of one repetition of `products`
_TRANSFER_BYTES = 256 * 2**20  # size of the file that `disk` writes and reads
BLOCK_SIZES = (128 * 2**10, 2**20, 8 * 2**20)  # bytes
QUEUE_DEPTHS = (8, 32, 128)
THREADS = (1, 2, 4)


def products(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Measure the highest rate of square matrix products in the training's precision. MFU is relative to this rate.

    A product of two n x n matrices has 2 n^3 FLOPs.
    """
    device = "cuda" if job.device_kind == "cuda" else "cpu"
    dtype = torch.bfloat16 if job.option("precision") == "bf16" else torch.float32
    size = job.option("product_size")
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    requests.report_build(0)
    while True:
        begin, shortest_s = time.perf_counter(), float("inf")
        while time.perf_counter() - begin < _REPETITION_S:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            requests.synchronize()
            shortest_s = min(shortest_s, time.perf_counter() - start)
        requests.end_repetition(tflops=2 * size**3 / shortest_s / 1e12)


def disk(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Measure DeepSpeed's aio handle with every combination of settings, with the calls of DeepSpeed's tensor swapper.

    `ds_nvme_tune` of DeepSpeed 0.19.8 is not used: it starts a process of 5 to 10 s for each combination, and it prints
    keys that are invalid in the DeepSpeed JSON.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from pretrain.engine.operators.build_ops import why_not_compilable
    from pretrain.errors import ConfigError

    reason = why_not_compilable("AsyncIOBuilder")
    if reason:
        raise ConfigError("--what offload", problem=f"DeepSpeed's async_io operator is not available ({reason})",
                          remedy="run launch/setup.sh --offload, which installs it")
    operator = AsyncIOBuilder().load(verbose=False)
    path = Path(job.option("nvme_path"), "ds-pretrain-bench.bin")
    buffer = operator.aio_handle(2**20, 8, False, True, 1).new_cpu_locked_tensor(_TRANSFER_BYTES, torch.empty(
        0, dtype=torch.uint8))
    buffer.fill_(1)
    try:
        requests.report_build(0)
        while True:
            requests.end_repetition(settings=[_transfer(operator, buffer, path, *combination) for combination in
                                              itertools.product(BLOCK_SIZES, QUEUE_DEPTHS, THREADS)])
    finally:
        path.unlink(missing_ok=True)


def _transfer(operator: Any, buffer: torch.Tensor, path: Path, block_size: int, queue_depth: int,
              threads: int) -> dict[str, Any]:
    """Write the buffer to the file and read it back. Return the settings and the rates in bytes per second."""
    handle = operator.aio_handle(block_size, queue_depth, False, True, threads)
    rates = {}
    for name, transfer in (("write", handle.sync_pwrite), ("read", handle.sync_pread)):
        start = time.perf_counter()
        transfer(buffer, str(path), 0)
        rates[f"{name}_bytes_per_s"] = buffer.nbytes / (time.perf_counter() - start)
    return {"block_size": block_size, "queue_depth": queue_depth, "intra_op_parallelism": threads, **rates}
