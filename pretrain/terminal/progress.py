"""Show progress in bytes: a live bar in a terminal, a line every 10 s in a log."""

import sys
import threading
import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Context manager that shows progress on stderr if `active`.

    total_bytes: 0 if it is unknown. done_bytes: bytes that an earlier process has done.
    """

    def __init__(self, title: str, total_bytes: int, *, done_bytes: int = 0, active: bool = True) -> None:
        active = active and sys.stderr is not None  # None: closed by the shell, as in `command 2>&-`
        self._active, self._lock = active, threading.Lock()
        self._title, self._total, self._note = title, total_bytes, ""
        self._done = self._done_before = done_bytes
        self._started = self._last_line = time.monotonic()
        self._bar = RichProgress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
            console=Console(stderr=True), disable=not (active and sys.stderr.isatty()))
        self._task = self._bar.add_task(title, total=total_bytes or None, completed=done_bytes, note="")

    def advance(self, num_bytes: int, note: str) -> None:
        """Add processed bytes. May be called from any thread."""
        with self._lock:
            self._done, self._note = self._done + num_bytes, note
        self._bar.update(self._task, completed=self._done, note=self._status())
        if self._active and self._bar.disable and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            percent = f"{100 * self._done // self._total}%, " if self._total else ""
            print(f"{self._title}: {percent}{self._status()}{self._eta()}", file=sys.stderr, flush=True)

    def _status(self) -> str:
        note = f", {self._note}" if self._note else ""
        return f"{self._done / 1e6:.1f} MB, {self._bytes_per_second() / 1e6:.1f} MB/s{note}"

    def _bytes_per_second(self) -> float:
        return (self._done - self._done_before) / max(time.monotonic() - self._started, 1e-3)

    def _eta(self) -> str:
        left, rate = self._total - self._done, self._bytes_per_second()
        return f", ETA {timedelta(seconds=round(left / rate))}" if left > 0 and rate > 0 else ""

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bar.stop()
