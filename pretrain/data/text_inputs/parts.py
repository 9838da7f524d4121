"""Divide the inputs among several machines: each reads the documents that begin in its part of the bytes.

All files, one after the other, are one stream of bytes, which is divided evenly. JSON lines, and text with a separator,
are divided inside a file: a part begins with the first document that begins at or after its first byte. Parquet files
are divided at rows. A text without separator is one document, and compressed files cannot be read from the middle: the
whole file belongs to the part in which it begins.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from pretrain.data.text_inputs.chunk import BOM, ReadSettings
from pretrain.data.text_inputs.find import Input
from pretrain.data.text_inputs.formats import Source, open_source
from pretrain.data.text_inputs.parquet import num_rows

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Part:
    """The inputs of one machine. The first file may be read from its middle on, and the last one to its middle."""

    files: tuple[Input, ...]
    first_file: int
    """number of the first file in the list of all inputs"""

    @property
    def last_file(self) -> int:
        """Number of the last file in the list of all inputs."""
        return self.first_file + len(self.files) - 1

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def part_of(files: Sequence[Input], settings: ReadSettings, index: int, count: int) -> Part:
    """Return the part `index`, from 0, of `count` parts. It may be empty. Raises ConfigError."""
    total = sum(file.num_bytes for file in files)
    first, last = total * index // count, total * (index + 1) // count
    parts: dict[int, Input] = {}
    begins = 0  # byte at which the file begins, in the bytes of all files
    for number, file in enumerate(files):
        start, stop = max(first - begins, 0), min(last - begins, file.num_bytes)
        if not _is_divisible(file, settings):
            if first <= begins < last or (begins == total and index == count - 1):  # the last files may be empty
                parts[number] = file
        elif start < stop and (part := _part_of_file(file, settings, start, stop)):
            parts[number] = part
        begins += file.num_bytes
    return Part(tuple(parts.values()), min(parts, default=0))


def _is_divisible(file: Input, settings: ReadSettings) -> bool:
    if file.dataset is not None and file.kind != "parquet":
        return False
    if file.kind == "parquet" or file.num_bytes == 0:
        return file.num_bytes > 0
    return not file.compression and (file.kind == "jsonl" or bool(settings.document_separator))


def _part_of_file(file: Input, settings: ReadSettings, start: int, stop: int) -> Input | None:
    """Return the part with the documents that begin in the bytes [start, stop) of a file; None if there are none."""
    size = file.num_bytes
    if file.kind == "parquet":
        whole = num_rows(file.path, file.open())
        begin, end = -(-start * whole // size), -(-stop * whole // size)
    else:
        whole, separator = size, b"\n" if file.kind == "jsonl" else settings.document_separator.encode()
        begin, end = _first_document(file, separator, start), _first_document(file, separator, stop)
    if (begin, end) == (0, whole):
        return file
    if begin == end:
        return None
    return replace(file, start=begin, stop=end, num_bytes=size * (end - begin) // whole)


def _first_document(file: Input, separator: bytes, byte: int) -> int:
    """Return the position of the first document that begins at or after `byte`; the size of the file if there is none.
    """
    if byte in (0, file.num_bytes):
        return byte
    with _opened(file) as source:
        first = len(BOM) if source.read(len(BOM)) == BOM else 0  # byte at which the first document begins
        start = _between_separators(source, separator, max(byte - len(separator), first), first)
        return next((end for end in _ends(source, separator, start) if end >= byte), file.num_bytes)


def _opened(file: Input) -> AbstractContextManager[Source]:
    """Open a file to read small parts of it. Of a store, nothing is fetched ahead."""
    return open_source(file.path) if file.stored is None else nullcontext(Source(file.stored.open()))


def _between_separators(source: Source, separator: bytes, byte: int, first: int) -> int:
    r"""Return the last position up to `byte` that no separator contains, so that searching may begin there.

    Separators such as \n\n overlap in \n\n\n, where only the first one counts. A run of them is searched from its
    beginning, as if the file were read from its beginning.
    """
    reach = len(separator) - 1
    while reach:
        low = max(byte - _BLOCK_BYTES, first)
        data = _read(source, low, byte + reach - low)
        while byte > low and (found := data.find(separator, max(byte - low - reach, 0), byte - low + reach)) >= 0:
            byte = low + found
        if byte - low >= reach or low == first:
            break
    return byte


def _ends(source: Source, separator: bytes, start: int) -> Iterator[int]:
    """Yield the position after each separator from `start` on."""
    data = b""
    source.seek(start)
    while block := source.read(_BLOCK_BYTES):
        data += block
        *complete, rest = data.split(separator)
        for text in complete:
            start += len(text) + len(separator)
            yield start
        data = rest[max(len(rest) - len(separator) + 1, 0):]
        start += len(rest) - len(data)


def _read(source: Source, start: int, size: int) -> bytes:
    source.seek(start)
    parts = []
    while size > 0 and (data := source.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
