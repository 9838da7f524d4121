"""Read the column of the text from Parquet files, a batch of rows at a time."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pretrain.data.text_inputs.chunk import LONG_BYTES, Chunk, Position
from pretrain.data.text_inputs.formats import import_pyarrow, input_name
from pretrain.data.text_inputs.stored_file import expect
from pretrain.data.text_inputs.text import text_cut
from pretrain.errors import ConfigError

_BUFFER_BYTES = 1 << 20
_MOST_VALUES = 1 << 14  # in a chunk
_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def read_parquet(path: str, column: str, start: Position, stop: int | None = None, *, chunk_bytes: int,
                 long_bytes: int, reader: Any = None) -> Iterator[Chunk]:
    """Yield the values of a column from the row `start.offset` to the row before `stop` in chunks. Raises ConfigError.

    reader: the open file, if `path` is a URL. Only its end and the needed parts of the column are fetched.
    """
    name = input_name(path)
    with _naming(name, "it cannot be read to its end"):
        file = open_parquet(path if reader is None else reader)
        size = os.path.getsize(path) if reader is None else reader.seek(0, os.SEEK_END)
        bytes_per_row = size / max(file.metadata.num_rows, 1)
        chunk_bytes = max(chunk_bytes, 4)  # the longest UTF-8 character
        chunks = ValueChunks(path, start, chunk_bytes, max(long_bytes, chunk_bytes), bytes_per_row)
        names = column_path(file.schema_arrow, column, name)
        if reader is not None:
            expect(reader, _ranges(file.metadata, ".".join(names), start.offset, stop))
        values = column_values(file, names, start.offset, chunk_bytes)
        for value in itertools.islice(values, None if stop is None else stop - start.offset):
            yield from chunks.add(value)
        yield from chunks.rest()


def check_parquet(path: str, column: str, reader: Any = None) -> None:
    """Raise ConfigError if a file is damaged, or has no text in this column. reader: see `read_parquet`."""
    name = input_name(path)
    with _naming(name, "this Parquet file is damaged"):
        column_path(open_parquet(path if reader is None else reader).schema_arrow, column, name)


def num_rows(path: str, reader: Any = None) -> int:
    """Return the number of rows of a file. Raises ConfigError. reader: see `read_parquet`."""
    with _naming(input_name(path), "it cannot be read"):
        return int(open_parquet(path if reader is None else reader).metadata.num_rows)


@contextmanager
def _naming(name: str, problem: str) -> Iterator[None]:
    """Convert errors of Arrow and of the file to ConfigError."""
    pyarrow = import_pyarrow(name)
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(name, problem=f"{problem}: {error}") from None


def open_parquet(source: Any) -> Any:
    """Open a path, or a file that is open for reading, so that little of it is in memory at once."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def _ranges(metadata: Any, column: str, first_row: int, stop_row: int | None) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes in which a column's values lie, from `first_row` to the row before `stop_row`."""
    rows_left = metadata.num_rows if stop_row is None else stop_row
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        if first_row < group.num_rows and rows_left > 0:
            for part in map(group.column, range(group.num_columns)):
                if part.path_in_schema == column:
                    starts = (part.dictionary_page_offset, part.data_page_offset)
                    start = min(offset for offset in starts if offset)  # None or 0: there is no dictionary
                    yield start, start + part.total_compressed_size
        first_row, rows_left = max(first_row - group.num_rows, 0), rows_left - group.num_rows


def column_path(schema: Any, column: str, path: str) -> list[str]:
    """Return the names that lead to a column of an Arrow schema: more than one for a field of a struct.

    Raises ConfigError if there is no such column, and if it is no text.
    """
    names = [column] if column in schema.names else column.split(".")
    fields, found = list(schema), None
    for name in names:
        found = next((field.type for field in fields if field.name == name), None)
        fields = list(found.fields) if found is not None and str(found).startswith("struct") else []
    where = f"{path}: column {column!r}"
    remedy = f"name the column of the text with --jsonl_key; the columns are {', '.join(schema.names[:8])}"
    if found is None:
        raise ConfigError(where, problem="there is no such column", word=column, known=schema.names, remedy=remedy)
    kind = getattr(found, "value_type", found) if str(found).startswith("dictionary") else found
    if str(kind) not in _TEXT_TYPES:
        raise ConfigError(where, found=f"values of type {found}", expected="text", remedy=remedy)
    return names


def column_values(file: Any, names: list[str], first_row: int,
                  batch_bytes: int) -> Iterator[bytes | memoryview | None]:
    """Yield the values of a column as UTF-8, from a row on."""
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first_row >= rows:
            first_row -= rows
            continue
        for batch in file.iter_batches(_batch_rows(file.metadata.row_group(group), ".".join(names), batch_bytes),
                                       row_groups=[group], columns=[".".join(names)], use_threads=False):
            skipped = min(first_row, batch.num_rows)
            first_row -= skipped
            yield from text_values(batch.column(0).slice(skipped), names)


def text_values(values: Any, names: list[str]) -> Iterator[bytes | memoryview | None]:
    """Yield the values of an Arrow array as UTF-8. `names`: what `column_path` returned for it."""
    import pyarrow
    import pyarrow.compute

    if len(names) > 1:
        values = pyarrow.compute.struct_field(values, names[1:])
    if str(values.type).startswith("dictionary"):
        values = values.dictionary_decode()
    values = values.cast(pyarrow.large_binary())
    yield from values.to_pylist() if values.nbytes < 2 * LONG_BYTES else _views(values)


def _views(values: Any) -> Iterator[memoryview | None]:
    """Yield the values of a large_binary array without a copy of them."""
    _, ends, content = values.buffers()
    bounds = memoryview(ends).cast("q")[values.offset : values.offset + len(values) + 1]
    data = memoryview(content)
    for number, is_valid in enumerate(values.is_valid().to_pylist()):
        yield data[bounds[number] : bounds[number + 1]] if is_valid else None


def _batch_rows(group: Any, column: str, batch_bytes: int) -> int:
    """Return how many rows have about `batch_bytes`."""
    size = sum(group.column(number).total_uncompressed_size for number in range(group.num_columns)
               if group.column(number).path_in_schema == column)
    return int(min(max(batch_bytes * group.num_rows // max(size, 1), 1), _MOST_VALUES))


class ValueChunks:
    """Groups values into chunks."""

    def __init__(self, path: str, start: Position, chunk_bytes: int, long_bytes: int, bytes_per_row: float) -> None:
        self._path = path
        self._position = start
        self._values: list[bytes | None] = []
        self._size = 0
        self._chunk_bytes, self._long_bytes = chunk_bytes, long_bytes
        self._bytes_per_row = bytes_per_row

    def add(self, value: bytes | memoryview | None) -> Iterator[Chunk]:
        """Add the value of the next row. Yield the chunks that are complete."""
        size = 0 if value is None else len(value)
        if self._size + size > self._chunk_bytes or len(self._values) == _MOST_VALUES:
            yield from self.rest()
        if value is not None and size > self._long_bytes:
            yield from self._parts(value)
        else:
            self._values.append(None if value is None else bytes(value))
            self._size += size

    def rest(self) -> Iterator[Chunk]:
        """Yield the values that are in no chunk yet."""
        if self._values:
            row = self._position.offset + len(self._values)
            yield self._chunk("values", Position(row, row + 1), values=tuple(self._values))
            self._values, self._size = [], 0

    def _parts(self, value: bytes | memoryview) -> Iterator[Chunk]:
        """Yield a long value in parts, without those that were read before the start."""
        row = self._position
        number = begin = 0
        while begin < len(value):
            size = len(value) - begin
            if size > self._chunk_bytes:
                size = text_cut(bytes(value[begin : begin + self._chunk_bytes]))
            part = bytes(value[begin : begin + size])
            begin, number = begin + size, number + 1
            ends = begin == len(value)
            if number > row.parts:
                end = Position(row.offset + 1, row.line + 1) if ends else row._replace(parts=number)
                yield self._chunk("part", end, data=part, ends_document=ends)

    def _chunk(self, kind: str, end: Position, **content: Any) -> Chunk:
        start, self._position = self._position, end
        size = int(end.offset * self._bytes_per_row) - int(start.offset * self._bytes_per_row)
        return Chunk(input_name(self._path), kind, start, end, size, is_parquet=True, **content)
