"""Goodput: fraction of the time since a run's first start that was spent in steps that were kept.

Steps that a resume or a rollback trained again, starts, saves and evaluations are not goodput.
"""

import time
from pathlib import Path

from pretrain.monitor.read_run_folder import is_number, newest_path, read_events, read_metrics


class Goodput:
    """Seconds in kept steps, and the time of the first start."""

    def __init__(self, first_start: float) -> None:
        self._first_start = first_start  # seconds since the epoch
        self._rows: list[tuple[int, float, float]] = []  # (last step, seconds of each step, kept seconds up to here)
        self._first_step = 0  # the step before the first row

    @classmethod
    def read(cls, run: Path, step: int) -> "Goodput":
        """Return the goodput of a run that resumes after `step`, from the rows and events of its earlier starts."""
        starts = (event.get("time") for event in read_events(run) if event["event"] == "start")
        first = next((start for start in starts if is_number(start)), time.time())
        goodput = cls(float(first))
        for row in newest_path([row for row in read_metrics(run) if is_number(row.get("step_time_ms"))]):
            goodput.add(int(row["step"]), float(row["step_time_ms"]) / 1e3)
        goodput.return_to(step)
        return goodput

    def add(self, step: int, step_seconds: float) -> None:
        """Add a row: each of the steps since the last row, up to `step`, took `step_seconds`."""
        before, _, kept = self._rows[-1] if self._rows else (self._first_step, 0.0, 0.0)
        self._rows.append((step, step_seconds, kept + (step - before) * step_seconds))

    def return_to(self, step: int) -> None:
        """Drop the steps after `step`: they will be trained again. Steps without a row count like the last one."""
        seconds = 0.0
        while self._rows and self._rows[-1][0] > step:
            _, seconds, _ = self._rows.pop()
        last = self._rows[-1] if self._rows else (self._first_step, 0.0, 0.0)
        if last[0] < step:
            self.add(step, seconds or last[1])

    def fraction(self, now: float) -> float | None:
        """Return the goodput at a time in seconds since the epoch; None if the clock went back to before the start."""
        passed = now - self._first_start
        kept = self._rows[-1][2] if self._rows else 0.0
        return min(kept / passed, 1.0) if passed > 0 else None
