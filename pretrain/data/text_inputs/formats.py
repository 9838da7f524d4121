"""Formats of inputs: detect them from the first bytes, and open plain, gzip and zstd files as streams of bytes."""

import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pretrain.data.text_inputs.chunk import BOM
from pretrain.data.text_inputs.stored_file import StoredFile, expect
from pretrain.data.text_inputs.text import parse_json
from pretrain.errors import ConfigError, import_package
from pretrain.remote import is_url, without_credentials

HEAD_BYTES = 1 << 16
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PARQUET = b"PAR1"
JSONL_ENDINGS = (".jsonl", ".ndjson", ".json", ".jsonlines")
_COMPRESSED_ENDINGS = (".gz", ".gzip", ".zst", ".zstd")
_KEY = rb'"(?:[^"\\\n]|\\.)*"\s*:\s*'
_OBJECT_BEGINS = re.compile(rb"\s*\{\s*(?:\}|" + _KEY + rb'["{\[\dtfn-])')
_LIST_OF_OBJECTS_BEGINS = re.compile(rb"\s*\[\s*\{\s*(?:\}|" + _KEY + rb")")
_MOST_LINES = 100


def compression_of(head: bytes) -> str:
    """Return "gzip", "zstd" or "" for a file that begins with `head`."""
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), "")


def utf16_problem(head: bytes) -> str:
    """Return "UTF-16" or "UTF-32" if `head` has the byte order mark of this encoding, else ""."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    return "UTF-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else ""


def utf16_error(where: str, encoding: str) -> ConfigError:
    """Return the error for text of another encoding."""
    return ConfigError(where, found=f"{encoding} text", expected="UTF-8",
                       remedy=f"convert the file first: iconv -f {encoding} -t UTF-8 FILE")


def says_jsonl(path: str) -> bool:
    """Return whether a file's name ends as names of JSON lines do."""
    name = path.lower()
    for ending in _COMPRESSED_ENDINGS:
        name = name.removesuffix(ending)
    return name.endswith(JSONL_ENDINGS)


def detect_kind(head: bytes, name: str, *, is_complete: bool) -> str:
    """Return "text" or "jsonl" for an input that begins with `head`; `is_complete`: `head` is all of it.

    The name only decides where the content leaves a doubt. Raises ConfigError if the content contradicts the name, or
    may be either.
    """
    lines = _lines(head.removeprefix(BOM), is_complete)
    if not lines:
        return "jsonl" if says_jsonl(name) else "text"
    number, first = lines[0]
    if _LIST_OF_OBJECTS_BEGINS.match(head.removeprefix(BOM)):
        raise _several_lines(f"{name}:{number}", "a JSON list", "jq -c '.[]'")
    if not first.lstrip().startswith(b"{"):
        if says_jsonl(name):
            raise _contradiction(f"{name}:{number}", "this line is not a JSON object")
        return "text"
    if len(lines) == 1 and not is_complete and b"\n" not in head.strip():
        are_objects = [_OBJECT_BEGINS.match(first) is not None]  # the beginning of a long line
    else:
        are_objects = [_is_object(line) for _, line in lines]
    if all(are_objects) or (any(are_objects) and says_jsonl(name)):
        return "jsonl"
    if any(are_objects):
        other = lines[are_objects.index(False)][0]
        raise ConfigError(name, problem=f"line {lines[are_objects.index(True)][0]} is a JSON object, and line {other} "
                          "is not", remedy="choose with --format jsonl or --format text")
    if _OBJECT_BEGINS.match(head.removeprefix(BOM)):
        raise _several_lines(f"{name}:{number}", "a JSON object", "jq -c .")
    if says_jsonl(name):
        raise _contradiction(f"{name}:{number}", f"this line is not valid JSON: {_json_error(first)}")
    return "text"


def _lines(head: bytes, is_complete: bool) -> list[tuple[int, bytes]]:
    """Return (number, line) of the first lines that are not blank, without the last line if it may be incomplete."""
    lines = [(number, line) for number, line in enumerate(head.split(b"\n"), 1)]
    if not is_complete and len(lines) > 1 and any(line.strip() for _, line in lines[:-1]):
        lines.pop()
    return [(number, line) for number, line in lines if line.strip()][:_MOST_LINES]


def _is_object(line: bytes) -> bool:
    try:
        return line.lstrip().startswith((b"{", BOM)) and isinstance(parse_json(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _json_error(line: bytes) -> str:
    try:
        parse_json(line.decode())
    except (ValueError, RecursionError) as error:
        return str(error)
    return "no object"


def _contradiction(where: str, problem: str) -> ConfigError:
    return ConfigError(where, problem=f"{problem}, although the file's name says so",
                       remedy="give --format text if the file is text")


def _several_lines(where: str, what: str, command: str) -> ConfigError:
    return ConfigError(where, problem=f"this looks like {what} that takes several lines",
                       remedy=f"convert it to JSON lines with: {command} FILE; or, if it is text, give --format text")


STDIN = "-"
_SKIP_BYTES = 1 << 20


class ByteStream(Protocol):
    """File that is open for reading."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


class Source:
    """An open file, after the bytes `head` that have been read already. Counts the bytes that are read."""

    def __init__(self, file: Any, head: bytes = b"") -> None:
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
def open_source(path: str, head: bytes = b"", *, reader: Any = None, start: int = 0,
                keep_open: bool = False) -> Iterator[Source]:
    """Open a file, a URL, or standard input ("-"). I/O errors and damaged compressed data become ConfigError.

    Args:
        reader: of a URL, its open file.
        start: byte at which reading begins.
        keep_open: do not close the file at the end.
    """
    name = input_name(path)
    source = None
    try:
        source = Source(_open(path, reader, start), head)
        yield source
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(name, problem=f"it cannot be read to its end: {reason}") from None
    finally:
        if source is not None and path != STDIN and not keep_open:
            source.file.close()


def _open(path: str, reader: Any, start: int) -> Any:
    file = reader
    if file is None:
        file = sys.stdin.buffer if path == STDIN else open(path, "rb")  # noqa: SIM115 (closed by the caller)
    if start:
        file.seek(start)
    return file


def input_name(path: str) -> str:
    """Return the name of an input for messages. Bytes of the path that are not UTF-8 become escapes."""
    if is_url(path):
        return without_credentials(path)
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


def read_all(path: str, compression: str, stored: StoredFile | None = None) -> bytes:
    """Return the decompressed content of a file. Raises ConfigError."""
    content, reader = b"", None if stored is None else stored.open()
    if stored is not None:
        expect(reader, [(0, stored.size)])
    with open_source(path, reader=reader) as source:
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
    return import_package("pyarrow", purpose, "data",
                          "the Python package pyarrow, which reads it, is not installed")
