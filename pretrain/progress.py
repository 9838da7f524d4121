"""Show progress in bytes: a live bar in a terminal, a line every 10 s in a log. And the console of all tables."""

import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment

from pretrain.errors import escape_controls
from pretrain.terminal import PrintableOutput

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
            console=terminal_console(stderr=True), disable=not (active and sys.stderr.isatty()))
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

class _ControlOutput:
    """File for rich, which writes escapes itself."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(self._stream.write_controls(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _EscapeText(RenderHook):
    """Escapes the text that rich shows, but not the controls that rich adds to it."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


class _Escaped:
    def __init__(self, content: ConsoleRenderable) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._content, options):
            yield Segment(text if control else escape_controls(text), style, control)


def terminal_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that shows text as it is: no markup, no colours for numbers, and no terminal escapes.

    `width`: number of columns if the output is not a terminal, which has its own.
    """
    stream: Any = sys.stderr if stderr else sys.stdout
    watched = stream is not None and stream.isatty()
    file: Any = _ControlOutput(stream) if watched and isinstance(stream, PrintableOutput) else stream
    console = Console(file=file, width=None if watched else width, highlight=False, markup=False)
    console.push_render_hook(_EscapeText())
    return console
