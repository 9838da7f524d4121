"""Lines for the person who watches a run: rows and a status line, from rank 0, on streams that never raise.

A terminal shows one status line, below the rows, that is updated in place. A log gets one line each.
"""

import contextlib
import io
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from pretrain.errors import escape_controls
from pretrain.printable_output import PrintableOutput

_STATUS_INTERVAL_S = 0.2
_CLEAR_LINE = "\r\033[K"
_FEWEST_COLUMNS = 20  # a smaller reported width is treated as an error


def terminal_columns(stream: TextIO) -> int | None:
    """Return the width of the terminal that `stream` writes to; None if it is not a terminal or has no width."""
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size(stream.fileno()).columns
        return columns if columns >= _FEWEST_COLUMNS else None
    return None


def wrap(text: str, columns: int | None, indent: int = 2) -> str:
    """Break a line that is longer than a terminal's width between words. None: unlimited.

    `indent`: number of spaces before the other lines.
    """
    if columns is None or len(text) <= columns:
        return text
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def print_rows(rows: Iterable[str], *, indent: int) -> None:
    """Print lines that begin with a word of `indent` columns. A terminal shows them wrapped below the text."""
    columns = None if sys.stdout is None else terminal_columns(sys.stdout)
    print("\n".join(wrap(row, columns, indent) for row in rows))


def aligned(rows: Sequence[Sequence[str]], num_words: int) -> list[str]:
    """Return rows as lines of aligned columns: the first `num_words` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) if column < num_words else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def is_watched(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal and this process is in its foreground, so that a person sees updates.

    `isatty` is not enough. Open MPI 4.1.4 gives each rank a terminal, even if the output goes to a file. And a
    background job of a shell must not overwrite the line in which the user types the next command.
    """
    try:
        return os.environ.get("TERM", "dumb") != "dumb" and stream.isatty() and _is_foreground(stream.fileno())
    except (OSError, ValueError):
        return False


def _is_foreground(descriptor: int) -> bool:
    """Return whether this process is in the foreground of the terminal `descriptor`.

    If `descriptor` is not this process's controlling terminal, the nearest ancestor with this controlling terminal
    decides. The reason: `ds-pretrain train` starts its launcher in a new session, without a terminal.
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
    """Context manager that prints to stdout if `active`. Only a watched terminal shows the status line."""

    def __init__(self, *, active: bool = True) -> None:
        self._active, self._stream = active and sys.stdout is not None, sys.stdout  # None if it was closed
        # checked once, so that files and pipes need no later checks
        self._may_be_watched = self._active and self._stream.isatty()
        self._status, self._shown_at = "", 0.0

    @property
    def columns(self) -> int | None:
        """Number of characters that fit on a line; None: unlimited."""
        return terminal_columns(self._stream) if self._may_be_watched else None

    def line(self, text: str) -> None:
        """Print a line that remains, above the status line."""
        if not self._active:
            return
        text = wrap(escape_controls(text), self.columns)
        if self._status and is_watched(self._stream):
            self._write(f"{_CLEAR_LINE}{text}\n{self._cut(self._status)}")
        else:
            self._status = ""
            self._write(f"{text}\n")

    def wants_status(self) -> bool:
        """Return whether the next status line is due."""
        return (self._may_be_watched and time.monotonic() - self._shown_at >= _STATUS_INTERVAL_S
                and is_watched(self._stream))

    def status(self, text: str) -> None:
        """Replace the status line."""
        if self._may_be_watched and is_watched(self._stream):
            self._shown_at, self._status = time.monotonic(), escape_controls(text)
            self._write(_CLEAR_LINE + self._cut(self._status))

    def clear(self) -> None:
        """Remove the status line."""
        if self._status and is_watched(self._stream):
            self._write(_CLEAR_LINE)
        self._status = ""

    def _cut(self, text: str) -> str:
        """Truncate a status line to the terminal's width, because a wrapped line cannot be overwritten."""
        return text[:(self.columns or 80) - 1]

    def _write(self, text: str) -> None:
        """Print, and ignore failures, which must not stop the training.

        Ctrl-C requests a save, but in `... | tee log` it also ends tee. And the disk of a log may be full.
        """
        try:
            getattr(self._stream, "write_controls", self._stream.write)(text)
            self._stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # so that the flush at exit succeeds
        except OSError:
            pass

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.clear()


def status(text: str) -> None:
    """Show on rank 0, on stderr, what a starting run is doing: its first row may take 30 s with cold disks.

    Call `clear_status` before other output; a traceback overwrites the line.
    """
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        sys.stderr.write(f"{_CLEAR_LINE}{text} ...\r" if is_watched(sys.stderr) else f"{text}\n")
        sys.stderr.flush()


def print_line(text: str) -> None:
    """Print a line that remains to stderr. A terminal shows it wrapped between words."""
    if sys.stderr is not None:
        print(wrap(text, terminal_columns(sys.stderr)), file=sys.stderr, flush=True)


def clear_status() -> None:
    """Erase the status line before lines that remain."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None and is_watched(sys.stderr):
        sys.stderr.write(_CLEAR_LINE)
        sys.stderr.flush()


class _LossyFile(io.FileIO):
    """A file descriptor, open for writing, that drops what cannot be written. The first failure is reported."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._has_failed = False

    def write(self, data: bytes) -> int:  # type: ignore[override] # any object with a buffer
        """Write, or drop `data`. Returns the number of bytes that need not be written again."""
        try:
            written = super().write(data)
            return len(data) if written is None else written  # None: a non-blocking descriptor whose reader is slow
        except OSError as error:
            self._report(error)
            if isinstance(error, BrokenPipeError):  # the reader does not come back
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)

    def _report(self, error: OSError) -> None:
        """Write one line to stderr, if this is stdout of rank 0."""
        if not self._has_failed and self.fileno() == 1 and os.environ.get("RANK", "0") == "0":
            line = f"warning: the output cannot be written ({error.strerror}); the run continues without it\n"
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        self._has_failed = True


def ignore_lost_output() -> None:
    """Replace sys.stdout and sys.stderr, unless a test or a notebook has replaced them, by streams that never raise.

    A pipe such as `... | head` closes early, and the disk of a log fills up. Every `print` of this program, of
    DeepSpeed or of another package would then raise OSError, on rank 0 alone, while the other ranks wait in a
    collective.
    """
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed before the start; this takes its descriptor, so that no other file gets it
        return _text(_LossyFile(os.open(os.devnull, os.O_WRONLY)), "utf-8", "replace")
    if not isinstance(stream, io.TextIOWrapper) or type(stream) not in (io.TextIOWrapper, PrintableOutput) or \
            isinstance(getattr(stream.buffer, "raw", None), _LossyFile):
        return stream
    try:
        stream.flush()
        file = _LossyFile(stream.fileno())
    except (OSError, ValueError):  # already full or closed: what is buffered is lost
        file = _LossyFile(1 if stream is sys.stdout else 2)
    return _text(file, stream.encoding, stream.errors, stream.line_buffering, stream.write_through)


def _text(file: _LossyFile, encoding: str, errors: str | None, line_buffering: bool = False,
          write_through: bool = False) -> TextIO:
    buffer = io.BufferedWriter(file)  # type: ignore[type-var] # typeshed wants `write` to take every kind of buffer
    return PrintableOutput(buffer, encoding=encoding, errors=errors, line_buffering=line_buffering,
                           write_through=write_through)
