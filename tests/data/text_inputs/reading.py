"""Helpers: write the same bytes in every compression, and read documents in every way."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from pretrain.data.text_inputs.chunk import BEGINNING, Chunk, Position, ReadSettings
from pretrain.data.text_inputs.documents import Skipped, documents
from pretrain.data.text_inputs.find import Input, find_inputs
from pretrain.data.text_inputs.reader import read_chunks

BAD_LINES = {  # name: (line 2 of a.jsonl, part of the message)
    "not json": (b"{'text': 1}", "a.jsonl:2: it is not valid JSON: Expecting property name"),
    "no object": (b"[1]", "a.jsonl:2: found a JSON list; expected one JSON object per line"),
    "two objects": (b'{"text": "a"}{"text": "b"}', "a.jsonl:2: it is not valid JSON: Extra data"),
    "no key": (b'{"txet": "a"}', "the JSON object has no key 'text'. Did you mean \"txet\"?"),
    "other key": (b'{"content": "a"}', "Name the key of the text with --jsonl_key; this object has content"),
    "null": (b'{"text": null}', "a.jsonl:2: the value of 'text' is null. Correct or remove this line"),
    "number": (b'{"text": 5}', "a.jsonl:2: the value of 'text' is a JSON int, not a string"),
    "surrogate": (b'{"text": "\\ud800"}', "a.jsonl:2: there is a lone surrogate U+D800 at character 0"),
    "NUL": (rb'{"text": "a\u0000"}', "a.jsonl:2: there is a NUL character (U+0000) at character 1: the document is"),
    "not utf-8": (b'{"text": "\xff"}', "a.jsonl:2: it is not valid JSON: 0xFF is not valid UTF-8 at byte 11"),
    "NUL byte": (b'{"text": "\0"}', "a.jsonl:2: it is not valid JSON: Invalid control character"),
    "too deep": (b'{"text": ' + b"[" * 200_000, "a.jsonl:2: it is not valid JSON"),
}
DEFAULTS = ReadSettings()
SMALL: dict[str, Any] = {"chunk_bytes": 8, "long_bytes": 32}


def write(path: Path, data: bytes, compression: str = "") -> str:
    """Write `data`, compressed into two members or frames. Return the path."""
    half = len(data) // 2
    if compression == "gzip":
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])
    elif compression == "zstd":
        data = b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:]))
    path.write_bytes(data)
    return str(path)


def write_parquet(path: Path, texts: Sequence[str | None], *, row_group_size: int = 1000) -> str:
    """Write a Parquet file with two columns. Return the path."""
    table = pyarrow.table({"number": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def json_lines(texts: Sequence[object], *, ensure_ascii: bool = True, newline: str = "\n", key: str = "text") -> bytes:
    """Return one JSON object per line."""
    lines = (json.dumps({"id": [1.5, {"text": "other"}], key: text}, ensure_ascii=ensure_ascii) for text in texts)
    return "".join(line + newline for line in lines).encode()


def chunks_of(path: str, settings: ReadSettings, *, start: Position = BEGINNING, **sizes: int) -> list[Chunk]:
    """Return the chunks of one file."""
    return list(read_chunks(one(path, settings), settings, start=start, **sizes))


def one(path: str, settings: ReadSettings = DEFAULTS) -> Input:
    """Return the only input of a path."""
    (found,) = find_inputs([path], settings).files
    return found


def texts_of(chunks: Sequence[Chunk], settings: ReadSettings) -> list[str | Skipped]:
    """Return the documents of chunks; the first `Skipped` for one that cannot be read."""
    found: list[str | Skipped] = []
    text, skipped, is_open = "", None, False
    for chunk in chunks:
        for piece in documents(chunk, settings):
            is_open = True
            if isinstance(piece, Skipped):
                skipped = skipped or piece
            else:
                text += piece.text
            if piece.ends_document:
                found.append(text if skipped is None else skipped)
                text, skipped, is_open = "", None, False
    assert not is_open
    return found


def read_texts(path: str, settings: ReadSettings = DEFAULTS, **sizes: int) -> list[str | Skipped]:
    """Return the documents of a file."""
    return texts_of(chunks_of(path, settings, **sizes), settings)
