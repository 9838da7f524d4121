"""Read inputs as streams of chunks, and chunks in batches for the workers, from any position on."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.data.text_inputs.chunk import BEGINNING, BOM, CHUNK_BYTES, LONG_BYTES, Chunk, Position, ReadSettings
from pretrain.data.text_inputs.find import Input
from pretrain.data.text_inputs.formats import ByteStream, Source, decompressed, open_source, skip
from pretrain.data.text_inputs.json_lines import LongLine, text_parts
from pretrain.data.text_inputs.parquet import read_parquet
from pretrain.data.text_inputs.stored_file import expect
from pretrain.data.text_inputs.text import separator_cut, text_cut
from pretrain.errors import ConfigError

_BLOCK_BYTES = 1 << 18
_COPY = "copy-"
_FILES_AHEAD = 4


def read_chunks(found: Input, settings: ReadSettings, *, start: Position = BEGINNING, chunk_bytes: int = CHUNK_BYTES,
                long_bytes: int = LONG_BYTES, reader: Any = None) -> Iterator[Chunk]:
    """Yield an input from the position `start` in chunks of about `chunk_bytes`; a long JSON line becomes several.

    reader: of a file at a URL, if it is open already.

    The chunks from a position on are always the same: whether reading began there or before. Standard input can only
    be read once, from its beginning. Raises ConfigError if the input cannot be read to its end.
    """
    start = found.beginning if start == BEGINNING else start
    if found.dataset is not None and found.kind != "parquet":
        yield from found.dataset.read(found.path, settings.jsonl_key, start, chunk_bytes=chunk_bytes,
                                      long_bytes=long_bytes)
        return
    if reader is None:
        reader = found.open()
    if found.kind == "parquet":
        yield from read_parquet(found.path, settings.jsonl_key, start, found.stop, chunk_bytes=chunk_bytes,
                                long_bytes=long_bytes, reader=reader)
        return
    first = 0 if found.compression or not found.can_resume else start.offset
    if found.stored is not None:
        expect(reader, [(first, found.stored.size)])
    with open_source(found.path, found.head, reader=reader, start=first) as source:
        stream = decompressed(source, found.compression)
        skip(stream, start.offset - first)
        if found.stop is not None:
            stream = _Limited(stream, found.stop - start.offset)
        text = _Reader(source, stream, found.name_of_lines, start)
        if start == BEGINNING:
            text.skip_bom()
        if found.kind == "jsonl":
            yield from _json_chunks(text, settings.jsonl_key, chunk_bytes, max(long_bytes, chunk_bytes))
        else:
            separator = settings.document_separator.encode()
            yield from _text_chunks(text, separator, chunk_bytes, is_new=start == BEGINNING)


class _Limited:
    """The next `size` bytes of a stream."""

    def __init__(self, stream: ByteStream, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(min(size, self._left))
        self._left -= len(data)
        return data


class _Reader:
    """A stream with the bytes that have been read ahead, and their position."""

    def __init__(self, source: Source, stream: ByteStream, name: str, position: Position) -> None:
        self.source = source
        self.stream = stream
        self.name = name
        self.position = position
        self.ahead = b""
        self.at_end = False
        self._reported = source.bytes_read

    def fill(self, size: int) -> None:
        """Read ahead until there are `size` bytes, or to the end."""
        parts, missing = [self.ahead], size - len(self.ahead)
        while missing > 0 and not self.at_end:
            data = self.stream.read(missing)
            self.at_end = not data
            missing -= len(data)
            parts.append(data)
        self.ahead = b"".join(parts)

    def skip_bom(self) -> None:
        """Skip a byte order mark."""
        self.fill(len(BOM))
        if self.ahead.startswith(BOM):
            self.ahead = self.ahead[len(BOM):]
            self.position = Position(len(BOM))

    def read_block(self) -> bytes:
        """Return the next bytes of the stream, after those in `ahead`."""
        return self.stream.read(_BLOCK_BYTES)

    def file_bytes(self) -> int:
        """Return the bytes of the file that were read since the last call."""
        new, self._reported = self.source.bytes_read - self._reported, self.source.bytes_read
        return new

    def take(self, size: int, kind: str, *, ends_document: bool = True) -> Chunk:
        """Return the next `size` bytes as a chunk."""
        data, self.ahead = self.ahead[:size], self.ahead[size:]
        start = self.position
        self.position = Position(start.offset + size, start.line + data.count(b"\n"))
        return Chunk(self.name, kind, start, self.position, self.file_bytes(), data, ends_document=ends_document)


def _json_chunks(reader: _Reader, jsonl_key: str, chunk_bytes: int, long_bytes: int) -> Iterator[Chunk]:
    size = chunk_bytes
    while True:
        reader.fill(size + 1)
        ahead = reader.ahead
        if not ahead:
            return
        cut = len(ahead) if len(ahead) <= chunk_bytes else (
            ahead.rfind(b"\n", 0, chunk_bytes) + 1 or ahead.find(b"\n", chunk_bytes, long_bytes) + 1)
        if not cut and len(ahead) > long_bytes:
            yield from _long_line(reader, jsonl_key)
        elif cut or len(ahead) <= size:
            yield reader.take(cut or len(ahead), "jsonl")
        else:
            size = min(2 * size, long_bytes)
            continue
        size = chunk_bytes


def _long_line(reader: _Reader, jsonl_key: str) -> Iterator[Chunk]:
    """Yield the text of a long JSON line in parts. The last chunk has no text, and the error of a line with one."""
    start, already_read = reader.position.at_line_start(), reader.position.parts
    line = LongLine(reader.ahead, reader.read_block, f"{reader.name}:{start.line}")
    error, before = "", reader.position
    number = 0
    try:
        for text in text_parts(line, jsonl_key):
            number += 1
            if number > already_read:
                end = start._replace(parts=number)
                yield Chunk(reader.name, "part", before, end, reader.file_bytes(), text.encode(), ends_document=False)
                before = end
    except ConfigError as problem:
        error = str(problem)
    reader.ahead = line.skip_to_end()
    reader.position = Position(start.offset + line.size, start.line + 1)
    yield Chunk(reader.name, "part", before, reader.position, reader.file_bytes(), error=error)


def _text_chunks(reader: _Reader, separator: bytes, chunk_bytes: int, *, is_new: bool) -> Iterator[Chunk]:
    size = max(chunk_bytes, len(separator), 4)  # 4: the longest UTF-8 character
    while True:
        reader.fill(size + max(len(separator), 1))
        ahead = reader.ahead
        if len(ahead) <= size:
            if ahead:
                yield reader.take(len(ahead), "text")
            elif is_new:  # an empty file is an empty document
                yield replace(reader.take(0, "text"), end=reader.position._replace(parts=1))
            return
        cut = separator_cut(ahead, separator, size) if separator else text_cut(ahead[:size])
        yield reader.take(cut, "text", ends_document=bool(separator) and ahead.endswith(separator, 0, cut))
        is_new = False


@dataclass(frozen=True)
class Place:
    """A position in the list of inputs."""

    input: int
    position: Position


FIRST_PLACE = Place(0, BEGINNING)


@dataclass(frozen=True)
class Batch:
    """Consecutive chunks of the inputs."""

    chunks: list[Chunk]
    continues: bool
    """whether the first chunk begins inside a document"""
    end: Place
    """place at which the next batch begins"""
    inputs: list[int]
    """number of the input of each chunk"""

    @property
    def file_bytes(self) -> int:
        return sum(chunk.file_bytes for chunk in self.chunks)


def read_batches(inputs: Sequence[Input], settings: ReadSettings, start: Place, *, continues: bool,
                 copies: Path | None = None) -> Iterator[Batch]:
    """Yield batches of about CHUNK_BYTES, in order. Small inputs are combined. Raises ConfigError.

    continues: whether `start` is inside a document.
    copies: folder for copies of compressed files at URLs; `delete_copies` deletes those that are not needed.
    """
    chunks, numbers = list[Chunk](), list[int]()
    size = 0
    for number, chunk, end in _chunks(inputs, settings, start, copies):
        chunks.append(chunk)
        numbers.append(number)
        size += chunk.num_bytes
        if size >= CHUNK_BYTES // 2 or len(chunks) >= CHUNK_BYTES // 64:  # empty inputs have no bytes
            yield Batch(chunks, continues, end, numbers)
            continues = not chunk.ends_document
            chunks, numbers, size = [], [], 0
    if chunks:
        yield Batch(chunks, continues, end, numbers)


def delete_copies(folder: Path, place: Place) -> None:
    """Delete the copies of files before a place at which a resume begins."""
    for path in folder.glob(f"{_COPY}*"):
        if int(path.name.removeprefix(_COPY)) < place.input:
            path.unlink()


def _chunks(inputs: Sequence[Input], settings: ReadSettings, start: Place,
            copies: Path | None) -> Iterator[tuple[int, Chunk, Place]]:
    """Yield the input of each chunk, the chunk, and the place of the next one: after the last chunk of an input, that
    is the next input.
    """
    for index, reader in _open_ahead(inputs, start.input, copies):
        position = start.position if index == start.input else BEGINNING
        previous: Chunk | None = None
        for chunk in read_chunks(inputs[index], settings, start=position, chunk_bytes=CHUNK_BYTES, reader=reader):
            if previous is not None:
                yield index, previous, Place(index, previous.end)
            previous = chunk
        if previous is not None:
            yield index, previous, Place(index + 1, BEGINNING)


def _open_ahead(inputs: Sequence[Input], first: int, copies: Path | None) -> Iterator[tuple[int, Any]]:
    """Yield the number of each input, and the open file of a URL. The next files are opened and fetched meanwhile.

    So small files do not wait for the network one after the other.
    """
    opened: deque[tuple[int, Any]] = deque()
    for index in range(first, len(inputs)):
        found = inputs[index]
        copy = copies / f"{_COPY}{index}" if copies is not None and found.compression else None
        reader = None if found.stored is None else found.open(copy)
        if found.stored is not None and index > first and found.kind != "parquet":
            expect(reader, [(0, found.stored.size)])
        opened.append((index, reader))
        if len(opened) > _FILES_AHEAD:
            yield opened.popleft()
    yield from opened
