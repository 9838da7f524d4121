"""Make stdout and stderr accept output that cannot be written, so that a lost log never ends a run.

A pipe such as `... | head` closes early, and the disk of a log fills up. Every `print` of this program, of DeepSpeed or
of another package would then raise OSError, on rank 0 alone, while the other ranks wait in a collective.
"""

import contextlib
import io
import os
import sys
from typing import TextIO

from pretrain.cli import PrintableOutput


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
    """Replace sys.stdout and sys.stderr, unless a test or a notebook has replaced them, by streams that never raise."""
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
