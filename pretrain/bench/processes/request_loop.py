"""The baseline's side: run timed steps when the benchmark asks for them, and otherwise sleep on a pipe."""

import contextlib
import ctypes
import gc
import json
import time
from typing import Any, NoReturn, TextIO

import torch

from pretrain.distributed.process import resident_bytes


class NoMoreRequests(BaseException):
    """The benchmark ended. A BaseException, so that no `except Exception` in a training loop catches it."""


def forget_peak() -> None:
    """Reset the peak memory, so that it leaves out what building the engine needed for a short time.

    Linux: "5" in /proc/self/clear_refs resets VmHWM, see proc(5).
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

    {"do": "repeat", "steps": N, "untimed_steps": M, ...} asks for M + N optimizer steps, of which the last N are timed.
    """

    def __init__(self, answers: TextIO, requests: TextIO, *, cuda: bool) -> None:
        self._answers, self._requests, self._cuda = answers, requests, cuda
        self._losses: list[torch.Tensor] = []
        self._steps_done, self._start = 0, 0.0
        self._bytes_before_build = 0  # resident before the model was built
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
        """Report that all imports are done. Memory and time from here on count for the baseline."""
        self.answer({"imported": True})
        self.wait_for_request()
        self._bytes_before_build = resident_bytes()[0]

    def report_build(self, parameters: int, **facts: Any) -> None:
        """Report that the baseline is ready, with its number of parameters; wait for the first repetition."""
        forget_peak()
        self.answer({"parameters": parameters, **facts})
        self.wait_for_request()

    def synchronize(self) -> None:
        """Wait until the GPU has finished; on a CPU do nothing."""
        if self._cuda:
            torch.cuda.synchronize()

    def after_step(self, loss: torch.Tensor | None) -> None:
        """Count a step. Call it after each optimizer step; it returns when another step is wanted.

        Raises NoMoreRequests.
        """
        if loss is not None:
            self._losses.append(loss.detach().reshape(()))
        self._steps_done += 1
        untimed = self.request.get("untimed_steps", 0)
        if self._steps_done == untimed:
            self.synchronize()
            self._start = time.perf_counter()
        if self._steps_done == untimed + self.request["steps"]:
            self.end_repetition()

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
        """Leave the baseline: its loop has no more steps."""
        raise NoMoreRequests
