"""One rank of a baseline: `python -m pretrain.bench.worker DESCRIPTOR`. It answers requests of the benchmark.

The descriptor is the rank's end of a connection. It first receives the rank and the BaselineJob.
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

from pretrain.bench.processes import BaselineJob
from pretrain.distributed.process import resident_bytes
from pretrain.engine.prepare import prepare_deepspeed

if TYPE_CHECKING:  # imported by `main`, after prepare_deepspeed
    import torch


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
        self._bytes_before_build = 0  # resident memory before the model was built
        self.request: dict[str, Any] = {}

    def answer(self, values: dict[str, Any]) -> None:
        self._connection.send(values)

    def wait_for_request(self) -> dict[str, Any]:
        """Sleep until the next request, then start the clock. Raises NoMoreRequests."""
        try:
            self.request = self._connection.recv()
        except EOFError:
            raise NoMoreRequests from None
        self._steps_done, self._losses = 0, []
        self.synchronize()
        self._start = time.perf_counter()
        return self.request

    def wait_for_build(self) -> None:
        """Report that all imports are done. From this call on, memory is counted for the baseline."""
        self.answer({"imported": True})
        self.wait_for_request()
        self._bytes_before_build = resident_bytes()[0]

    def report_build(self, parameters: int, **facts: Any) -> None:
        """Report that the baseline is ready, and its number of parameters. Then wait for the first repetition."""
        self._reset_peak_memory()
        self.answer({"parameters": parameters, **facts})
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
        self.answer({"seconds": seconds, "losses": [float(loss) for loss in self._losses], **self._memory(), **figures})
        self.wait_for_request()

    def end(self) -> NoReturn:
        """End the baseline, because its training loop has no more steps."""
        raise NoMoreRequests

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


def main() -> None:
    """Run the job's baseline until the benchmark closes the connection, then exit this process."""
    connection, code = Connection(int(sys.argv[1])), 0
    rank, job = connection.recv()
    if job.device_kind == "cpu":
        os.sched_setaffinity(0, job.cores[rank])
    if job.is_project:  # other programs import DeepSpeed without this preparation
        prepare_deepspeed(job.device)
    requests = RequestLoop(connection, cuda=job.device_kind == "cuda")
    try:
        _run(job, requests)
    except NoMoreRequests:
        pass
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        requests.answer({"error": text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"})
        code = 1
    sys.stderr.flush()
    os._exit(code)  # sys.exit would wait for threads of the training loops, such as those of the data loader


def _run(job: BaselineJob, requests: RequestLoop) -> None:
    from pretrain.engine.operator_cache import cache_operators

    cache_operators()  # all baselines use the same compiled operators
    module, function = job.main.split(".")
    baseline = getattr(importlib.import_module(f"pretrain.bench.{module}"), function)
    requests.wait_for_build()
    baseline(job, requests)


if __name__ == "__main__":
    main()
