"""The process of a baseline: `python -m tools.benchmarks.worker DESCRIPTOR`. It answers requests.

The descriptor is the process's end of a connection. It first receives the BaselineJob.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from pretrain.distributed.process import resident_bytes
from pretrain.engine.prepare import prepare_deepspeed
from tools.benchmarks.processes import BaselineJob

if TYPE_CHECKING:  # imported by `main`, after prepare_deepspeed
    import torch


_PRODUCTS_S = 1.0  # duration of one repetition of `products`


class NoMoreRequests(BaseException):
    """The benchmark needs no more steps. This is a BaseException, so that `except Exception` does not catch it."""


class RequestLoop:
    """Receives the benchmark's requests, and sends the answers.

    The request {"steps": N, "untimed_steps": M} means: do M + N optimizer steps, and time the last N.
    """

    def __init__(self, connection: Connection, *, cuda: bool) -> None:
        self._connection, self._cuda = connection, cuda
        self._losses: list[torch.Tensor] = []
        self._steps_done, self._start = 0, 0.0
        self.request: dict[str, Any] = {}
        self.wait_for_request()  # the request to build the baseline
        self._bytes_before_build = resident_bytes()[0]

    def wait_for_request(self) -> None:
        """Sleep until the next request, then start the clock. Raises NoMoreRequests."""
        try:
            self.request = self._connection.recv()
        except EOFError:
            raise NoMoreRequests from None
        self._steps_done, self._losses = 0, []
        self.synchronize()
        self._start = time.perf_counter()

    def report_build(self, model: "torch.nn.Module | None" = None) -> None:
        """Report that the baseline is ready, and the parameters of its model. Then wait for the first repetition."""
        self._reset_peak_memory()
        self._connection.send({"parameters": sum(weight.numel() for weight in model.parameters()) if model else 0})
        self.wait_for_request()

    def synchronize(self) -> None:
        """Wait until the GPU has finished; on a CPU do nothing."""
        if self._cuda:
            import torch

            torch.cuda.synchronize()

    def after_step(self, loss: "torch.Tensor") -> None:
        """Count a step. Call this after each optimizer step.

        After the last step of a request, this answers and waits for the next request. Raises NoMoreRequests.
        """
        self._losses.append(loss.detach().reshape(()))
        self._steps_done += 1
        untimed = self.request.get("untimed_steps", 0)
        if self._steps_done == untimed:
            self.synchronize()
            self._start = time.perf_counter()
        if self._steps_done == untimed + self.request["steps"]:
            self.end_repetition()

    def end_repetition(self, **figures: Any) -> None:
        """Answer with time, losses, memory and figures, then wait for the next request. Raises NoMoreRequests."""
        self.synchronize()
        seconds = time.perf_counter() - self._start
        self._connection.send({"seconds": seconds, "losses": [float(loss) for loss in self._losses], **self._memory(),
                               **figures})
        self.wait_for_request()

    def _reset_peak_memory(self) -> None:
        """Reset the peak memory, so that it does not include temporary memory from building the engine.

        On Linux, writing "5" to /proc/self/clear_refs resets VmHWM; see proc(5).
        """
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def _memory(self) -> dict[str, int]:
        if self._cuda:
            import torch

            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()  # the other baselines use the same GPU
            return {"peak_memory_bytes": peaks[0], "reserved_bytes": peaks[1]}
        peak = resident_bytes()[1]
        return {"peak_memory_bytes": peak - self._bytes_before_build, "resident_bytes": peak}


def products(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Measure the highest rate of square matrix products in the training's precision. MFU is relative to this rate.

    A product of two n x n matrices has 2 n^3 FLOPs.
    """
    import torch

    device = "cuda" if job.device_kind == "cuda" else "cpu"
    dtype = torch.float32 if job.options["precision"] == "fp32" else torch.bfloat16
    size = job.options["product_size"]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    requests.report_build()
    while True:
        begin, shortest_s = time.perf_counter(), float("inf")
        while time.perf_counter() - begin < _PRODUCTS_S:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            requests.synchronize()
            shortest_s = min(shortest_s, time.perf_counter() - start)
        requests.end_repetition(tflops=2 * size**3 / shortest_s / 1e12)


def main() -> None:
    """Run the job's baseline until the benchmark closes the connection, then exit this process."""
    connection, code = Connection(int(sys.argv[1])), 0
    job: BaselineJob = connection.recv()
    if job.is_project:  # other programs import DeepSpeed without this preparation
        prepare_deepspeed(job.device, deterministic=job.plan().args.deterministic)
    try:
        _run(job, connection)
    except NoMoreRequests:
        pass
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        connection.send({"error": text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"})
        code = 1
    sys.stderr.flush()
    os._exit(code)  # sys.exit would wait for threads of the training loops, such as the data loader's


def _run(job: BaselineJob, connection: Connection) -> None:
    from pretrain.engine.operator_cache import cache_operators

    cache_operators()  # all baselines use the same compiled operators
    module, function = job.main.split(".")
    baseline = getattr(importlib.import_module(f"tools.benchmarks.{module}"), function)
    baseline(job, RequestLoop(connection, cuda=job.device_kind == "cuda"))


if __name__ == "__main__":
    main()
