"""Answer the benchmark's requests inside a baseline's process: run timed steps, then wait for the next request."""

import contextlib
import ctypes
import gc
import json
import time
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

import torch

from pretrain.distributed.process import resident_bytes


class NoMoreRequests(BaseException):
    """The benchmark needs no more steps. This is a BaseException, so that `except Exception` does not catch it."""


def reset_peak_memory() -> None:
    """Reset the peak memory, so that it does not include temporary memory from building the engine.

    On Linux, writing "5" to /proc/self/clear_refs resets VmHWM; see proc(5).
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


class RequestLoop:
    """Reads the benchmark's requests, one JSON line each, and writes the answers.

    The request {"do": "repeat", "steps": N, "untimed_steps": M} means: do M + N optimizer steps, and time the last N.
    """

    def __init__(self, answers: TextIO, requests: TextIO, *, cuda: bool) -> None:
        self._answers, self._requests, self._cuda = answers, requests, cuda
        self._losses: list[torch.Tensor] = []
        self._steps_done, self._start = 0, 0.0
        self._bytes_before_build = 0  # resident memory before the model was built
        self.request: dict[str, Any] = {}

    def answer(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), file=self._answers, flush=True)

    def wait_for_request(self) -> dict[str, Any]:
        """Sleep until the next request, then start the clock. Raises NoMoreRequests."""
        line = self._requests.readline()
        self.request = json.loads(line) if line else {"do": "end"}
        if self.request["do"] == "end":
            raise NoMoreRequests
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
        reset_peak_memory()
        self.answer({"parameters": parameters, **facts})
        self.wait_for_request()

    def synchronize(self) -> None:
        """Wait until the GPU has finished; on a CPU do nothing."""
        if self._cuda:
            torch.cuda.synchronize()

    def after_step(self, loss: torch.Tensor | None, figures: Callable[[], dict[str, Any]] = dict) -> None:
        """Count a step. Call this after each optimizer step.

        After the last step of a request, this answers, with the result of `figures` too, and waits for the next
        request. Raises NoMoreRequests.
        """
        if loss is not None:
            self._losses.append(loss.detach().reshape(()))
        self._steps_done += 1
        untimed = self.request.get("untimed_steps", 0)
        if self._steps_done == untimed:
            self.synchronize()
            self._start = time.perf_counter()
        if self._steps_done == untimed + self.request["steps"]:
            self.end_repetition(**figures())

    def end_repetition(self, **figures: Any) -> None:
        """Answer with time, losses and memory, then wait for the next request. Raises NoMoreRequests."""
        self.synchronize()
        seconds = time.perf_counter() - self._start
        values = {"seconds": seconds, "losses": [float(loss) for loss in self._losses], **self._memory(), **figures}
        if self._cuda:
            torch.cuda.empty_cache()  # the other baselines use the same GPU
        self.answer(values)
        self.wait_for_request()

    def _memory(self) -> dict[str, int]:
        if self._cuda:
            return {"peak_memory_bytes": torch.cuda.max_memory_allocated(),
                    "reserved_bytes": torch.cuda.max_memory_reserved()}
        peak = resident_bytes()[1]
        return {"peak_memory_bytes": peak - self._bytes_before_build, "resident_bytes": peak}

    def end(self) -> NoReturn:
        """End the baseline, because its training loop has no more steps."""
        raise NoMoreRequests
