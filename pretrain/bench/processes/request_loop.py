"""Inside a contender's process: it trains when it is asked to, times itself, and otherwise sleeps on a pipe."""

import contextlib
import ctypes
import gc
import json
import time
from typing import Any, NoReturn, TextIO

import torch

from pretrain.distributed.process import resident_bytes


class Ended(BaseException):
    """No more rounds are wanted. No `except Exception` in anybody's training loop may stop it."""


def forget_peak() -> None:
    """What building took for a moment is no part of the training's peak (Linux: proc(5), clear_refs, 5)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


class Rounds:
    """The parent's requests, one JSON line each, and the answers.

    {"do": "round", "steps": N, "untimed": M, ...}: M + N optimizer steps, of which N are timed.
    """

    def __init__(self, answers: TextIO, requests: TextIO, *, cuda: bool) -> None:
        self._answers, self._requests, self._cuda = answers, requests, cuda
        self._losses: list[torch.Tensor] = []
        self._done, self._start = 0, 0.0
        self.baseline_bytes = 0  # resident before the model
        self.request: dict[str, Any] = {}

    def answer(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), file=self._answers, flush=True)

    def wait(self) -> dict[str, Any]:
        """Sleep until the next request. Raises Ended."""
        line = self._requests.readline()
        self.request = json.loads(line) if line else {"do": "end"}
        if self.request["do"] == "end":
            raise Ended
        self._done, self._losses = 0, []
        self.synchronize()
        self._start = time.perf_counter()
        return self.request

    def wait_for_build(self) -> None:
        """Imports are done; the rest is the contender's own memory and time."""
        self.answer({"imported": True})
        self.wait()
        self.baseline_bytes = resident_bytes()[0]

    def built(self, parameters: int, **facts: Any) -> None:
        """The contender is ready: tell its number of parameters, and wait for the first round, whose peak counts."""
        forget_peak()
        self.answer({"parameters": parameters, **facts})
        self.wait()

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def after_step(self, loss: torch.Tensor | None) -> None:
        """To be called after each optimizer step; comes back when the next one is wanted. Raises Ended."""
        if loss is not None:
            self._losses.append(loss.detach().reshape(()))
        self._done += 1
        untimed = self.request.get("untimed", 0)
        if self._done == untimed:
            self.synchronize()
            self._start = time.perf_counter()
        if self._done == untimed + self.request["steps"]:
            self.end_round()

    def end_round(self, **figures: Any) -> None:
        """Answer with time, losses and memory; then wait for the next round. Raises Ended."""
        self.synchronize()
        seconds = time.perf_counter() - self._start
        values = {"seconds": seconds, "losses": [float(loss) for loss in self._losses], **self._memory(), **figures}
        if self._cuda:
            torch.cuda.empty_cache()  # the others need the room
        self.answer(values)
        self.wait()

    def _memory(self) -> dict[str, int]:
        if self._cuda:
            return {"peak_memory_bytes": torch.cuda.max_memory_allocated(),
                    "reserved_bytes": torch.cuda.max_memory_reserved()}
        peak = resident_bytes()[1]
        return {"peak_memory_bytes": peak - self.baseline_bytes, "resident_bytes": peak}

    def end(self) -> NoReturn:
        raise Ended
