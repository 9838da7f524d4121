"""Read text from plain text files (one document each) and JSON lines (one document per line), also gzipped."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError

CHUNK_BYTES = 1 << 19
JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Chunk:
    """A part of a file: complete JSON lines, or a piece of plain text that ends between two characters."""

    path: str
    first_line: int
    """number of the first line, from 1"""
    data: bytes
    is_jsonl: bool
    ends_file: bool
    file_bytes: int
    """bytes that this chunk takes in the file on disk (compressed if gzipped); for a progress bar"""


def check_inputs(paths: Sequence[str]) -> int:
    """Return the total size in bytes. Raises ConfigError for a path that is not a file, and if all files are empty."""
    total = 0
    for path in paths:
        file = Path(path)
        if not file.is_file():
            problem = "this is a folder" if file.is_dir() else "there is no such file"
            raise ConfigError(path, problem=problem, remedy="give text, .jsonl or .gz files")
        total += file.stat().st_size
    if total == 0:
        raise ConfigError(" ".join(paths) or "INPUT", problem="there is no text",
                          remedy="give files that are not empty")
    return total


def read_chunks(path: str, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Yield the file in chunks of about `chunk_bytes`; a longer JSON line is not split. Raises ConfigError."""
    name = path[:-3] if path.endswith(".gz") else path
    is_jsonl = name.endswith(JSONL_ENDINGS)
    find_cut = _line_end if is_jsonl else _text_cut
    line, position = 1, 0
    try:
        with open(path, "rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            rest = stream.read(chunk_bytes)
            while rest:
                more = stream.read(chunk_bytes)
                cut = find_cut(rest) if more else len(rest)
                if cut:
                    data = rest[:cut]
                    yield Chunk(path, line, data, is_jsonl, not more, raw.tell() - position)
                    line, position = line + data.count(b"\n"), raw.tell()
                rest = rest[cut:] + more
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(path, problem=f"it cannot be read to its end: {error}") from None


def _line_end(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _text_cut(data: bytes) -> int:
    """Return where to split a text: after its last line, else before its last space, else before its last character."""
    cut = _line_end(data) or data.rfind(b" ")
    if cut > 0:
        return cut
    cut = len(data) - 1
    while cut > 0 and data[cut] & 0xC0 == 0x80:  # a UTF-8 continuation byte
        cut -= 1
    return cut


def read_texts(chunk: Chunk, *, jsonl_key: str) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends here). Raises ConfigError that names file and line."""
    if not chunk.is_jsonl:
        yield decode_utf8(chunk.data, chunk.path, chunk.first_line), chunk.ends_file
        return
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if line.strip():
            yield text_of_json_line(line, f"{chunk.path}:{number}", jsonl_key), True


def text_of_json_line(line: bytes, where: str, jsonl_key: str) -> str:
    """Return the text at `jsonl_key` of a JSON object. Raises ConfigError that begins with `where`."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(where, problem=f"it is not valid JSON: {error}",
                          remedy="write one JSON object per line") from None
    if not isinstance(value, dict):
        raise ConfigError(where, found=f"a JSON {type(value).__name__}", expected="one JSON object per line")
    text = value.get(jsonl_key)
    if not isinstance(text, str):
        keys = ", ".join(list(value)[:8]) or "no keys"
        found = f"has no key {jsonl_key!r}" if jsonl_key not in value else f"has no string at {jsonl_key!r}"
        raise ConfigError(where, problem=f"the JSON object {found}", word=jsonl_key, known=value,
                          remedy=f"name the key of the text with --jsonl_key; this object has {keys}")
    check_unicode(text, where)
    return text


def decode_utf8(data: bytes, path: str, first_line: int = 1) -> str:
    """Decode UTF-8. Raises ConfigError that names file and line; `first_line` is the number of the first line."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}", found=f"byte 0x{data[error.start]:02X}", expected="UTF-8 text",
                          remedy="convert the file first, for example with iconv -t UTF-8") from None


def check_unicode(text: str, where: str) -> None:
    """Raise ConfigError for text that UTF-8 cannot represent: tokenizers replace such characters in different ways."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ConfigError(where, problem=f"there is a lone surrogate {code} at character {error.start}",
                          remedy="correct or remove this document") from None


def make_folder(path: Path) -> Path:
    """Create the folder if needed, and return it. Raises ConfigError if it cannot be created or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(path), problem=f"this folder cannot be created: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(str(path), problem="you may not write to this folder")
    return path
