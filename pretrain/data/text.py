"""Reads text out of files: plain text (a document a file), JSON lines (a document a line), either gzipped."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError

CHUNK_BYTES = 1 << 19
_JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Chunk:
    """A stretch of a file: whole JSON lines, or a part of a plain text cut where no character is."""

    path: str
    first_line: int
    """number of the first line, from 1"""
    data: bytes
    is_jsonl: bool
    ends_file: bool
    file_bytes: int
    """bytes of the file as it is on disk (gzipped perhaps) that this chunk took, for a progress bar"""


def check_inputs(paths: Sequence[str]) -> int:
    """Bytes of all files together. Raises ConfigError for what is no readable file, and where all are empty."""
    total = 0
    for path in paths:
        file = Path(path)
        if not file.is_file():
            found = "a folder" if file.is_dir() else "no such file"
            raise ConfigError(path, found=found, expected="a text, .jsonl or .gz file")
        total += file.stat().st_size
    if total == 0:
        raise ConfigError(" ".join(paths) or "INPUT", found="no text", expected="files that hold some")
    return total


def read_chunks(path: str, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The file in stretches of about `chunk_bytes` (a longer JSON line stays whole). Raises ConfigError."""
    name = path[:-3] if path.endswith(".gz") else path
    is_jsonl = name.endswith(_JSONL_ENDINGS)
    line, position = 1, 0
    try:
        with open(path, "rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            rest = stream.read(chunk_bytes)
            while rest:
                more = stream.read(chunk_bytes)
                cut = len(rest) if not more else _line_end(rest) if is_jsonl else _text_cut(rest)
                if cut:
                    data = rest[:cut]
                    yield Chunk(path, line, data, is_jsonl, not more, raw.tell() - position)
                    line, position = line + data.count(b"\n"), raw.tell()
                rest = rest[cut:] + more
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(path, found=str(error), expected="a file that can be read to its end") from None


def _line_end(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _text_cut(data: bytes) -> int:
    """Where to cut a text: after a line, else before a space, else between two characters."""
    cut = _line_end(data) or data.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(data) - 1
    while cut > 0 and data[cut] & 0xC0 == 0x80:  # a UTF-8 continuation byte
        cut -= 1
    return cut


def read_texts(chunk: Chunk, *, jsonl_key: str) -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends with it). Raises ConfigError naming file and line."""
    if not chunk.is_jsonl:
        yield _decode(chunk.data, chunk.path, chunk.first_line), chunk.ends_file
        return
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if line.strip():
            yield _text_of_line(line, f"{chunk.path}:{number}", jsonl_key), True


def _text_of_line(line: bytes, where: str, jsonl_key: str) -> str:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, found=f"{error}", expected="a JSON object a line") from None
    if not isinstance(value, dict):
        raise ConfigError(where, found=f"a JSON {type(value).__name__}", expected="a JSON object a line")
    text = value.get(jsonl_key)
    if not isinstance(text, str):
        found = f"no key {jsonl_key!r}" if jsonl_key not in value else f"{jsonl_key!r}: {type(text).__name__}"
        raise ConfigError(where, found=found, expected="a string", word=jsonl_key, known=value,
                          remedy=f"--jsonl_key takes one of: {', '.join(list(value)[:8]) or 'none'}")
    check_unicode(text, where)
    return text


def _decode(data: bytes, path: str, first_line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}", found=f"byte 0x{data[error.start]:02X}", expected="UTF-8 text",
                          remedy="convert it first, e.g. with iconv -t UTF-8") from None


def check_unicode(text: str, where: str) -> None:
    """Raises ConfigError for what has no UTF-8 form; tokenizers would each replace it in their own way."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(where, found=f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
                          expected="Unicode text", remedy="mend or drop that document") from None


def make_folder(path: Path) -> Path:
    """The folder, made and writable. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(path), found=str(error.strerror), expected="a folder that can be made") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(str(path), found="no right to write there", expected="a folder that can be written to")
    return path
