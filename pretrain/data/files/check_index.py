"""Check that the entries of a .idx file agree with one another: all of them, or runs that are spread over the file."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pretrain.data.files.index_file import RUN_ENTRIES, IndexFile, spread
from pretrain.data.files.index_format import REWRITE
from pretrain.errors import ConfigError

_CHUNK_ENTRIES = 2**18


def check_all_entries(index: IndexFile) -> None:
    """Check every entry. Raises ConfigError."""
    end = 0  # byte of the .bin at which the last sequence ends
    for first, last in _chunks(index.num_sequences):
        end = _check_sequences(index, first, last, expected=end)
    previous = 0
    for first, last in _chunks(index.num_index_entries):
        previous = _check_documents(index, first, last, previous=previous)
    check_ends(index)


def check_sampled_entries(index: IndexFile) -> None:
    """Check runs of entries that are spread over the file. Raises ConfigError."""
    end = 0
    for first in spread(index.num_sequences, RUN_ENTRIES):
        last = min(first + RUN_ENTRIES, index.num_sequences)
        end = _check_sequences(index, first, last, expected=0 if first == 0 else None, at_least=end)
    previous = 0
    for first in spread(index.num_index_entries, RUN_ENTRIES):
        last = min(first + RUN_ENTRIES, index.num_index_entries)
        previous = _check_documents(index, first, last, previous=previous)
    check_ends(index)


def check_ends(index: IndexFile) -> None:
    """Check the first and last entry of the document index. Raises ConfigError.

    The last one may be less than the number of sequences: see `IndexedDataset`.
    """
    if not index.num_index_entries:
        raise _documents_error(index, "without entries")
    first, last = int(index.document_index(0, 1)[0]), _last_entry(index)
    if first != 0 or not 0 <= last <= index.num_sequences:
        raise _documents_error(index, f"from {first} to {last}")


def _last_entry(index: IndexFile) -> int:
    return int(index.document_index(index.num_index_entries - 1, index.num_index_entries)[0])


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, _CHUNK_ENTRIES):
        yield first, min(first + _CHUNK_ENTRIES, total)


def _check_sequences(index: IndexFile, first: int, last: int, *, expected: int | None, at_least: int = 0) -> int:
    """Check the sequences [first, last). Return the byte of the .bin at which the last one ends.

    `expected`: byte at which the first one must begin; None: any that is not below `at_least`.
    """
    if first == last:
        return at_least
    lengths = index.lengths(first, last).astype(np.int64)
    pointers = index.pointers(first, last)
    if int(lengths.min()) < 0:
        raise ConfigError(str(index.path), found=f"a sequence of {lengths.min()} tokens", expected="at least 0 tokens",
                          remedy=REWRITE)
    if expected is None:
        expected = int(pointers[0])
        if expected < at_least or expected % index.dtype.itemsize:
            raise ConfigError(str(index.path), found=f"sequence {first} at byte {expected} of the .bin",
                              expected=f"a multiple of {index.dtype.itemsize}, at least {at_least}", remedy=REWRITE)
    ends = expected + np.cumsum(lengths) * index.dtype.itemsize
    starts = np.concatenate([np.array([expected], np.int64), ends[:-1]])
    _check_equal(index, first, pointers, starts)
    return int(ends[-1])


def _check_equal(index: IndexFile, first: int, pointers: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
    wrong = np.flatnonzero(pointers != starts)
    if len(wrong):
        number = int(wrong[0])
        after = f", where sequence {first + number - 1} ends" if first + number else ""
        raise ConfigError(str(index.path), found=f"sequence {first + number} at byte {pointers[number]} of the .bin",
                          expected=f"byte {starts[number]}{after}", remedy=REWRITE)


def _check_documents(index: IndexFile, first: int, last: int, *, previous: int) -> int:
    """Check that the entries [first, last) of the document index rise from `previous`. Return the last one."""
    entries = index.document_index(first, last)
    if first == last:
        return previous
    if entries[0] < previous or not bool((entries[1:] >= entries[:-1]).all()):
        raise _documents_error(index, f"that falls between its entries {first} and {last}")
    return int(entries[-1])


def _documents_error(index: IndexFile, found: str) -> ConfigError:
    return ConfigError(str(index.path), found=f"a document index {found}",
                       expected=f"values that rise from 0 to {index.num_sequences}", remedy=REWRITE)
