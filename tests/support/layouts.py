"""Layouts to save and load in, for the tests of checkpoints across layouts."""

import threading
import time
from pathlib import Path
from typing import Any

from tests.support.cases import config
from tests.support.launch import run_worker

SAVED, STEPS = 3, 8  # steps before the checkpoint, and in all


def plain(stage: int, **others: Any) -> dict[str, Any]:
    """DeepSpeed JSON of two data-parallel ranks, 8 samples a step."""
    return config(stage, micro=2, accumulation=2, **others)


def staged(stage: int, **others: Any) -> dict[str, Any]:
    """DeepSpeed JSON of two pipeline stages, 8 samples a step."""
    return config(stage, micro=2, accumulation=4, stages=2, **others)


def fp16(values: dict[str, Any]) -> dict[str, Any]:
    """With a loss scale that grows while the test runs."""
    return {**values, "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}


def relative(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two rows of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def run_layouts(cases: dict[str, tuple[int, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """Run `layout_worker.py` once for each number of ranks; the results by case."""
    results: dict[str, Any] = {}
    for ranks in sorted({ranks for ranks, _ in cases.values()}):
        own = [case for n, case in cases.values() if n == ranks]
        results |= run_worker("layout_worker.py", own, ranks, folder / str(ranks))
    return results


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: what it would be killed for."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


class Watch:
    """Anonymous memory of this process while a block runs, looked at every 5 ms."""

    def __enter__(self) -> "Watch":
        self.before = self.peak = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
