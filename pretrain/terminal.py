"""stdout and stderr of every program, and lines for the person who watches a run: rows and a status line, from rank 0.

The streams send no escapes to the terminal. They raise an error of their own if they cannot be written; in a run they
never raise. A terminal shows one status line, below the rows, that is updated in place. A log gets one line each.
"""

import contextlib
import io
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from pretrain.errors import escape_controls

_CURSOR = re.compile(r"(\r|\x1b\[[AK])")  # to the beginning of the line, a line up, and erase the rest of the line
_STATUS_INTERVAL_S = 0.2
_CLEAR_LINE = "\r\033[K"
_FEWEST_COLUMNS = 20  # a smaller reported width is treated as an error


class OutputError(OSError):
    """stdout or stderr cannot be written, as on a full disk: `run_main` knows that no other file is meant."""


class _OutputFile(io.FileIO):
    """The descriptor of stdout or stderr. `is_lossy`: it drops what cannot be written, and reports the first failure.

    Otherwise it raises BrokenPipeError or OutputError.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.is_lossy = self.has_failed = False

    def write(self, data: bytes) -> int | None:  # type: ignore[override] # any object with a buffer
        """Write. Returns the number of bytes that need not be written again."""
        try:
            written = super().write(data)
            return len(data) if written is None and self.is_lossy else written  # None: the reader of a pipe is slow
        except OSError as error:
            if self.is_lossy:
                self._lose(error)
                return len(data)
            raise error if isinstance(error, BrokenPipeError) else OutputError(error.errno, error.strerror) from None

    def _lose(self, error: OSError) -> None:
        """Write one line to stderr, if this is stdout of rank 0."""
        if not self.has_failed and self.fileno() == 1 and os.environ.get("RANK", "0") == "0":
            line = f"warning: the output cannot be written ({error.strerror}); the run continues without it\n"
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        self.has_failed = True
        if isinstance(error, BrokenPipeError):  # the reader does not come back
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


class PrintableOutput(io.TextIOWrapper):
    """stdout or stderr without terminal escapes: the text may come from a run folder or a data set of someone else.

    On stderr, progress bars of other packages may move the cursor to the beginning of this line or of the line above.
    """

    def __init__(self, stream: TextIO | None, descriptor: int) -> None:
        """Take the place of `stream`; None: it was closed before the start."""
        self.file = _OutputFile(descriptor)
        settings: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"} if stream is None else {
            name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        super().__init__(io.BufferedWriter(self.file), **settings)  # type: ignore[type-var] # see `_OutputFile.write`

    def write(self, text: str) -> int:
        parts = _CURSOR.split(text) if self.file.fileno() == 2 else [text]
        super().write("".join(part if number % 2 else escape_controls(part) for number, part in enumerate(parts)))
        return len(text)

    def write_controls(self, text: str) -> int:
        """Write text of this program that contains terminal escapes."""
        return super().write(text)


def escape_output() -> None:
    """Replace sys.stdout and sys.stderr by `PrintableOutput`, unless they are closed or a test has replaced them."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            with contextlib.suppress(OSError, ValueError):  # already full or closed: what is buffered is lost
                stream.flush()
                descriptor = stream.fileno()
            setattr(sys, name, PrintableOutput(stream, descriptor))


def ignore_lost_output() -> None:
    """Let sys.stdout and sys.stderr never raise, unless a test or a notebook has replaced them.

    A pipe such as `... | head` closes early, and the disk of a log fills up. Every `print` of this program, of
    DeepSpeed or of another package would then raise OSError, on rank 0 alone, while the other ranks wait in a
    collective.
    """
    escape_output()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start; this takes its descriptor, so that no file gets it
            setattr(sys, name, PrintableOutput(None, os.open(os.devnull, os.O_WRONLY)))
        if isinstance(stream := getattr(sys, name), PrintableOutput):
            stream.file.is_lossy = True


def drop_lost_output() -> None:
    """Drop what cannot be written: at exit the interpreter flushes again, and would print another error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, PrintableOutput):
            stream.file.is_lossy = stream.file.has_failed = True
            stream.flush()


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
    """Context manager that prints to stdout if `active`. Only a watched terminal shows the status line.

    Failures must not stop the training. Ctrl-C requests a save, but in `... | tee log` it also ends tee.
    """

    def __init__(self, *, active: bool = True) -> None:
        if active:
            ignore_lost_output()
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
        getattr(self._stream, "write_controls", self._stream.write)(text)
        self._stream.flush()

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
