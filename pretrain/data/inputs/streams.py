"""Open plain, gzip and zstd files as streams of decompressed bytes."""

import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

from pretrain.errors import ConfigError

STDIN = "-"
_SKIP_BYTES = 1 << 20


class ByteStream(Protocol):
    """File that is open for reading."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


class Source:
    """An open file, after the bytes `head` that have been read already. Counts the bytes that are read."""

    def __init__(self, file: BinaryIO, head: bytes = b"") -> None:
        self.file = file
        self.bytes_read = 0
        self.closed = False  # pyarrow checks it
        self._head = head

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes (-1: all); none at the end."""
        data, self._head = (self._head, b"") if size < 0 else (self._head[:size], self._head[size:])
        data += self.file.read(size - len(data) if size >= 0 else -1)
        self.bytes_read += len(data)
        return data

    def close(self) -> None:
        """Do nothing: `open_source` closes the file. Arrow calls this method, and prints a complaint without it."""

    def seek(self, offset: int) -> None:
        """Continue at `offset`."""
        self.file.seek(offset)


@contextmanager
def open_source(path: str, head: bytes = b"") -> Iterator[Source]:
    """Open a file, or standard input ("-"). I/O errors and damaged compressed data become ConfigError."""
    name = input_name(path)
    source = None
    try:
        source = Source(sys.stdin.buffer if path == STDIN else open(path, "rb"), head)  # noqa: SIM115 (closed below)
        yield source
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(name, problem=f"it cannot be read to its end: {reason}") from None
    finally:
        if source is not None and path != STDIN:
            source.file.close()


def input_name(path: str) -> str:
    """Return the name of an input for messages. Bytes of the path that are not UTF-8 become escapes."""
    return "standard input" if path == STDIN else os.fsencode(path).decode("utf-8", "backslashreplace")


def decompressed(source: Source, compression: str) -> ByteStream:
    """Return the decompressed content of a source. `compression` is "gzip", "zstd" or ""."""
    if compression == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=source), 1 << 17)
    if compression == "zstd":
        pyarrow = import_pyarrow("a .zst file")
        # zstandard's stream_reader (0.25) ends silently where a file was cut; Arrow reports it.
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(source, mode="r"), "zstd")
    return source


def read_all(path: str, compression: str) -> bytes:
    """Return the decompressed content of a file. Raises ConfigError."""
    content = b""
    with open_source(path) as source:
        stream = decompressed(source, compression)
        while data := stream.read(_SKIP_BYTES):
            content += data
    return content


def skip(stream: ByteStream, size: int) -> None:
    """Read and drop `size` bytes."""
    while size > 0:
        data = stream.read(min(size, _SKIP_BYTES))
        if not data:
            raise EOFError("it has become shorter")
        size -= len(data)


def import_pyarrow(purpose: str) -> Any:
    """Return the module pyarrow. Raises ConfigError with the command that installs it."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(purpose, problem="the Python package pyarrow, which reads it, is not installed",
                          remedy="pip install -c launch/constraints.txt -e '.[data]'") from None
    return pyarrow
