"""What a run prints: lines that stay and, in a terminal, a status line below them that is rewritten in place."""

import contextlib
import os
import sys
import textwrap
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

_SECONDS_BETWEEN = 0.2  # of two status lines
_CLEAR_LINE = "\r\033[K"
_SMALLEST = 20  # columns; a terminal that reports fewer is not believed


def terminal_columns(stream: TextIO) -> int | None:
    """Width of the terminal that `stream` writes to; None where it is no terminal, or one that does not say."""
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size(stream.fileno()).columns
        return columns if columns >= _SMALLEST else None
    return None


def is_watched(stream: TextIO) -> bool:
    """Whether a person looks at `stream` as it is written: a terminal, and this run is in its foreground.

    A terminal is not enough: Open MPI gives each rank one of its own, whatever becomes of the output (4.1.4). And a job
    that the shell runs in the background must not rewrite the line in which the next command is typed.
    """
    try:
        return os.environ.get("TERM", "dumb") != "dumb" and stream.isatty() and _is_foreground(stream.fileno())
    except (OSError, ValueError):
        return False


def _is_foreground(descriptor: int) -> bool:
    """Whether this process, or the nearest one above it that has this controlling terminal, is in its foreground.

    ds-pretrain and launch/supervise.py start their launcher in a session of its own, which has no terminal.
    """
    terminal, pid = os.fstat(descriptor).st_rdev, os.getpid()
    while pid > 0:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        parent, group, _, controlling, foreground = map(int, values[1:6])  # see proc(5)
        if os.makedev(controlling >> 8 & 0xFFF, controlling & 0xFF | controlling >> 12 & 0xFFF00) == terminal:
            return group == foreground
        pid = parent
    return False


class Screen:
    """Context manager that prints to stdout if it is `active`. Only a watched terminal has the status line."""

    def __init__(self, *, active: bool = True) -> None:
        self._active, self._stream = active and sys.stdout is not None, sys.stdout  # it is None where it was closed
        self._may_be_watched = self._active and self._stream.isatty()  # a file or a pipe costs nothing more
        self._status, self._shown_at = "", 0.0

    @property
    def columns(self) -> int | None:
        """How many characters a line has room for; None: any number."""
        return terminal_columns(self._stream) if self._may_be_watched else None

    def line(self, text: str) -> None:
        """Print a line that stays, above the status line."""
        if not self._active:
            return
        if self.columns is not None and len(text) > self.columns:
            text = textwrap.fill(text, self.columns, subsequent_indent="  ", break_long_words=False,
                                 break_on_hyphens=False)
        if self._status and is_watched(self._stream):
            self._write(f"{_CLEAR_LINE}{text}\n{self._cut(self._status)}")
        else:
            self._status = ""
            self._write(f"{text}\n")

    def wants_status(self) -> bool:
        """Whether it is time for another status line."""
        return (self._may_be_watched and time.monotonic() - self._shown_at >= _SECONDS_BETWEEN
                and is_watched(self._stream))

    def status(self, text: str) -> None:
        """Show what the run is doing, in place of the status line before."""
        if self._may_be_watched and is_watched(self._stream):
            self._shown_at, self._status = time.monotonic(), text
            self._write(_CLEAR_LINE + self._cut(text))

    def clear(self) -> None:
        """Remove the status line."""
        if self._status and is_watched(self._stream):
            self._write(_CLEAR_LINE)
        self._status = ""

    def _cut(self, text: str) -> str:
        """A status line that wraps could not be rewritten."""
        return text[:(self.columns or 80) - 1]

    def _write(self, text: str) -> None:
        """Print, or do nothing: a failed write is no reason to stop training.

        `... | tee log` loses its reader by the Ctrl-C that asks for a save; a log may be on a full disk.
        """
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # the flush at exit works then
        except OSError:
            pass

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.clear()
