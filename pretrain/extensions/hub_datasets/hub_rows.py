"""Read the rows of the data files of datasets (see hub_dataset.py).

Each data file is read independently: a chunk depends on the file and the row at which it begins, and on nothing else. A
resume opens the file of its position, and none before it. Parquet is read as other inputs are: the library would read
a file from its beginning, a complete row group at a time.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pretrain.data.text_inputs.chunk import Chunk, Position
from pretrain.data.text_inputs.dataset import DataFile
from pretrain.data.text_inputs.formats import input_name
from pretrain.data.text_inputs.parquet import ValueChunks, column_path, text_values
from pretrain.extensions.hub_datasets.hub_dataset import HubDataset, library
from pretrain.extensions.hub_datasets.hub_requests import ask_hub

_BATCH_ROWS = 32  # rows held in memory at once: 0.4 M rows/s, which is 70% of the speed of 1,000
_COMPRESSION_RATIO = 4  # assumed, for the progress bar
_Values = list[bytes | memoryview | None]


def read_data_file(dataset: HubDataset, path: str, column: str, start: Position, *, chunk_bytes: int,
                   long_bytes: int) -> Iterator[Chunk]:
    """Yield the values of a column from the row `start.offset` on in chunks. Raises ConfigError."""
    file = next(file for file in dataset.files if file.path == path)
    rows = _Rows(dataset, file, column, start.offset)
    chunk_bytes = max(chunk_bytes, 4)  # the longest UTF-8 character
    before: Chunk | None = None
    for chunk in _chunks(rows, ValueChunks(path, start, chunk_bytes, max(long_bytes, chunk_bytes), 0)):
        if before is not None:
            yield replace(before, file_bytes=rows.file_bytes(before.end) - rows.file_bytes(before.start))
        before = chunk
    if before is not None:  # the number of rows was not known before: the last chunk has the rest of the bytes
        yield replace(before, file_bytes=file.num_bytes - rows.file_bytes(before.start))


def _chunks(rows: "_Rows", chunks: ValueChunks) -> Iterator[Chunk]:
    while (batch := rows.next_batch()) is not None:
        for value in batch:
            yield from chunks.add(value)
    yield from chunks.rest()


class _Rows:
    """The values of a column of a data file from a row on. After a failure of the network, it is opened again."""

    def __init__(self, dataset: HubDataset, file: DataFile, column: str, first_row: int) -> None:
        self._dataset, self._file, self._column = dataset, file, column
        self._name = input_name(file.path)
        self._next_row = first_row
        self._batches: Iterator[tuple[int, _Values]] | None = None
        self._bytes_per_row = 0.0

    def next_batch(self) -> _Values | None:
        """Return the next values; None at the end of the file. Raises ConfigError."""
        return ask_hub(self._try_next, self._name)

    def file_bytes(self, position: Position) -> int:
        """Estimate the bytes of the file before a position, from the first rows of the file."""
        return min(int(position.offset * self._bytes_per_row), self._file.num_bytes)

    def _try_next(self) -> _Values | None:
        try:
            if self._batches is None:
                self._batches = self._read_batches()
            for row, values in self._batches:
                new = values[self._next_row - row :]
                self._next_row = row + len(values)
                return new
            return None
        except BaseException:
            self._batches = None
            raise

    def _read_batches(self) -> Iterator[tuple[int, _Values]]:
        """Yield (number of the first row, values) of batches. The rows before are read, and dropped."""
        row = 0
        for table in self._stream().with_format("arrow").iter(batch_size=_BATCH_ROWS):
            if row == 0 or row + table.num_rows > self._next_row:
                names = column_path(table.schema, self._column, self._name)
                values = [value for array in table.column(names[0]).chunks for value in text_values(array, names)]
                if row == 0:
                    self._estimate(values)
                if row + len(values) > self._next_row:
                    yield row, values
            row += table.num_rows

    def _estimate(self, values: _Values) -> None:
        size = sum(len(value or b"") + 1 for value in values)
        self._bytes_per_row = size / max(len(values), 1) / (_COMPRESSION_RATIO if self._file.compression else 1)

    def _stream(self) -> Any:
        """Return the library's dataset of this file alone, with the column of the text only."""
        datasets = library()
        if self._dataset.builder is None:
            stream = datasets.Dataset.from_file(self._file.path)
        else:
            split = self._dataset.found.split
            builder = copy.copy(self._dataset.builder)
            builder.config, builder.info = copy.copy(builder.config), copy.deepcopy(builder.info)
            builder.config.data_files = {split: [self._file.path]}
            stream = builder.as_streaming_dataset(split)
        if stream.features is None:  # some JSON: the library learns the columns while it reads
            return stream
        return stream.select_columns(column_path(stream.features.arrow_schema, self._column, self._name)[:1])
