"""Follow the rows that a run writes, with the times at which they appear."""

import json
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SeenRow:
    """A row of a .jsonl file."""

    time: float  # when the row was first seen, in seconds since 1970
    offset: int  # position in the file, in bytes
    values: dict[str, Any]


@dataclass
class RowFile:
    """The rows of a .jsonl file that have been seen so far."""

    path: Path
    rows: list[SeenRow] = field(default_factory=list)
    _offset: int = 0

    def poll(self) -> None:
        """Read the lines that were completed since the last call. Lines that are not JSON objects are skipped."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        now, complete = time.time(), data[:data.rfind(b"\n") + 1]
        for line in complete.splitlines(keepends=True):
            try:
                values = json.loads(line)
            except ValueError:
                values = None
            if isinstance(values, dict):
                self.rows.append(SeenRow(now, self._offset, values))
            self._offset += len(line)


class RunWatch:
    """Follows metrics.jsonl and events.jsonl of a run, and knows to which start each row belongs.

    The supervisor's thread calls `mark_start`; another thread polls.
    """

    def __init__(self, run: Path) -> None:
        self.metrics, self.events = RowFile(run / "metrics.jsonl"), RowFile(run / "events.jsonl")
        self.start_times: list[float] = []  # of each start, in seconds since 1970
        self._start_offsets: list[int] = []  # size of metrics.jsonl at each start
        self._lock = threading.Lock()

    def mark_start(self) -> None:
        """Record that a start begins now."""
        path = self.metrics.path
        with self._lock:
            self._start_offsets.append(path.stat().st_size if path.exists() else 0)
            self.start_times.append(time.time())

    def poll(self) -> None:
        """Read new rows."""
        with self._lock:
            self.metrics.poll()
            self.events.poll()

    @property
    def num_starts(self) -> int:
        return len(self.start_times)

    def steps(self) -> list[SeenRow]:
        """Return the rows of training steps, of all starts."""
        return [row for row in list(self.metrics.rows) if "step_time_ms" in row.values]

    def steps_of_start(self, start: int) -> list[SeenRow]:
        """Return the rows of training steps of start number `start`, from 1."""
        return [row for row in self.steps() if self.start_of(row) == start]

    def start_of(self, row: SeenRow) -> int:
        """Return the number of the start that wrote this row of metrics.jsonl, from 1."""
        return bisect_right(self._start_offsets, row.offset)

    def newest_step(self) -> int:
        """Return the last step that any start has logged; 0 if there is none."""
        return next((int(row.values["step"]) for row in reversed(self.metrics.rows) if "step_time_ms" in row.values), 0)

    def current_step(self) -> int:
        """Return the last step that the current start has logged; 0 if it has logged none."""
        rows = self.metrics.rows
        for row in reversed(rows):
            if "step_time_ms" in row.values:
                return int(row.values["step"]) if self.start_of(row) == self.num_starts else 0
        return 0
