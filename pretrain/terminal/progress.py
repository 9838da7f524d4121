"""Show progress in bytes: a live bar in a terminal, a line every 10 s in a log."""

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Context manager that shows progress on stderr if `active`."""

    def __init__(self, title: str, total_bytes: int, *, active: bool = True) -> None:
        self._active, self._lock = active, threading.Lock()
        self._title, self._total, self._done, self._note = title, max(total_bytes, 1), 0, ""
        self._started = self._last_line = time.monotonic()
        self._bar = RichProgress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
            console=Console(stderr=True), disable=not (active and sys.stderr.isatty()))
        self._task = self._bar.add_task(title, total=self._total, note="")

    def advance(self, num_bytes: int, note: str) -> None:
        """Add processed bytes. May be called from any thread."""
        with self._lock:
            self._done, self._note = self._done + num_bytes, note
        self._bar.update(self._task, completed=self._done, note=self._status())
        if self._active and self._bar.disable and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{self._title}: {100 * self._done // self._total}%, {self._status()}", file=sys.stderr, flush=True)

    def _status(self) -> str:
        megabytes = self._done / 1e6
        return f"{megabytes:.1f} MB, {megabytes / max(time.monotonic() - self._started, 1e-3):.1f} MB/s, {self._note}"

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bar.stop()
