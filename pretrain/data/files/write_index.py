"""Write a .idx file from lengths in a file, with little memory for any number of documents."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pretrain.data.files.index_format import CODES, HEADER, LENGTH_DTYPE, MAGIC, OFFSET_DTYPE

_CHUNK_ENTRIES = 2**18


def write_index(path: Path, dtype: npt.DTypeLike, lengths: Path, document_ends: Path | None = None) -> str:
    """Write a .idx file to the disk, and return its SHA-256. Raises OSError.

    lengths: a file with the number of tokens of each sequence, little-endian int32.
    document_ends: a file with the number of sequences up to the end of each document, little-endian int64; None: each
        sequence is a document.
    """
    num_sequences = lengths.stat().st_size // LENGTH_DTYPE.itemsize
    num_documents = num_sequences if document_ends is None else document_ends.stat().st_size // OFFSET_DTYPE.itemsize
    digest = hashlib.sha256()
    with path.open("wb") as file:
        def write(content: bytes) -> None:
            file.write(content)
            digest.update(content)

        write(HEADER.pack(MAGIC, 1, CODES[np.dtype(dtype)], num_sequences, num_documents + 1))
        for values in _read(lengths, LENGTH_DTYPE):
            write(values.tobytes())
        for values in _pointers(lengths, np.dtype(dtype).itemsize):
            write(values.astype(OFFSET_DTYPE).tobytes())
        write(bytes(OFFSET_DTYPE.itemsize))  # the first document begins with sequence 0
        for values in _read(document_ends, OFFSET_DTYPE) if document_ends is not None else _count(num_documents):
            write(values.tobytes())
        _sync(file)
    return digest.hexdigest()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _read(path: Path, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    with path.open("rb") as file:
        while content := file.read(_CHUNK_ENTRIES * dtype.itemsize):
            yield np.frombuffer(content, dtype)


def _pointers(lengths: Path, itemsize: int) -> Iterator[npt.NDArray[np.int64]]:
    end = 0
    for values in _read(lengths, LENGTH_DTYPE):
        sizes = values.astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        yield ends - sizes
        end = int(ends[-1])


def _count(total: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the numbers 1 to `total` in chunks."""
    for first in range(1, total + 1, _CHUNK_ENTRIES):
        yield np.arange(first, min(first + _CHUNK_ENTRIES, total + 1), dtype=OFFSET_DTYPE)
