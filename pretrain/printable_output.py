"""stdout and stderr of every program: they send no escapes to the terminal, and have an error of their own."""

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pretrain.errors import escape_controls

_CURSOR = re.compile(r"(\r|\x1b\[[AK])")  # to the beginning of the line, a line up, and erase the rest of the line


class OutputError(OSError):
    """stdout or stderr cannot be written, as on a full disk."""


@contextmanager
def _named_errors() -> Iterator[None]:
    """Raise OutputError, by which `run_main` knows that no other file is meant, or BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from None


class PrintableOutput(io.TextIOWrapper):
    """stdout or stderr without terminal escapes: the text may come from a run folder or a data set of someone else.

    On stderr, progress bars of other packages may move the cursor to the beginning of this line or of the line above.
    """

    def write(self, text: str) -> int:
        parts = _CURSOR.split(text) if self.fileno() == 2 else [text]
        with _named_errors():
            super().write("".join(part if number % 2 else escape_controls(part) for number, part in enumerate(parts)))
        return len(text)

    def flush(self) -> None:
        with _named_errors():
            super().flush()

    def write_controls(self, text: str) -> int:
        """Write text of this program that contains terminal escapes."""
        return super().write(text)


def escape_output() -> None:
    """Replace sys.stdout and sys.stderr by `PrintableOutput`, unless they are closed or a test has replaced them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            file = io.BufferedWriter(io.FileIO(stream.fileno(), "w", closefd=False))
            setattr(sys, name, PrintableOutput(file, encoding=stream.encoding, errors=stream.errors,
                                               line_buffering=stream.line_buffering,
                                               write_through=stream.write_through))


def drop_lost_output() -> None:
    """Drop what cannot be written: at exit the interpreter flushes again, and would print another error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
