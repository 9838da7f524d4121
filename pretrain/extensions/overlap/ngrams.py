"""An index of the n-grams of evaluation sets, and the search for them in training data, in several processes.

The search does not hash each n-gram of the tokens. With s = (n + 1) // 2, the tokens are divided into blocks of s. Each
n-gram contains a complete block. So only n-grams around a block that the evaluation sets have are hashed, and
compared token by token if the hash is known.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from pretrain.data.prepare.worker_pool import map_in_order
from pretrain.data.token_files.index_file import ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.inspect_files import Advance

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xF1357AEA2E62A9C5)  # odd
_SMALLEST_FILTER, _LARGEST_FILTER = 16, 28  # bits: a table of 64 KiB to 256 MiB
_FILTER_FACTOR = 16  # bytes of the filter per block: 1 of 16 other blocks passes it
_PART_TOKENS = 1 << 18  # searched at once, so that the intermediate values fit into a core's cache
_COMPARED = 1 << 18  # n-grams that are compared token by token at once
_JOB_TOKENS = 1 << 22
_READ_DOCUMENTS = 1 << 16  # whose bounds are read at once


@dataclass(frozen=True)
class Ngrams:
    """All n-grams of the evaluation sets. An n-gram's id is its position in the sorted hashes."""

    n: int
    multiplier: int
    tokens: npt.NDArray[Any]
    """of all evaluation documents"""
    hashes: Hashes
    """of each different n-gram, sorted [number]"""
    first: Numbers
    """position in `tokens` at which each n-gram occurs first [number]"""
    blocks: Hashes
    """hashes of the blocks of (n + 1) // 2 tokens, sorted"""
    filter: npt.NDArray[np.bool_]
    """whether a block has a hash with these highest bits [2^k]"""

    @property
    def number(self) -> int:
        """Number of different n-grams."""
        return len(self.hashes)

    def save(self, folder: Path) -> None:
        """Write the index to files, which several processes can map into their memory."""
        np.save(folder / "sizes.npy", np.array([self.n, self.multiplier], np.uint64))
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))

    def find(self, tokens: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
        """Return the positions in `tokens` at which known n-grams begin, in ascending order, and the n-grams' ids."""
        positions, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for start, stop in ranges(0, len(tokens) - self.n + 1, _PART_TOKENS):
            found, known = self._find(tokens[start : stop + self.n - 1])
            positions.append(found + start)
            ids.append(known)
        return np.concatenate(positions), np.concatenate(ids)

    def _find(self, tokens: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
        size = (self.n + 1) // 2
        blocks = tokens[: len(tokens) // size * size].reshape(-1, size)
        hashes = _hash([blocks[:, place] for place in range(size)], self.multiplier)
        shift = np.uint64(65 - len(self.filter).bit_length())
        candidates = np.flatnonzero(self.filter[(hashes >> shift).view(np.int64)])
        candidates = candidates[_lookup(self.blocks, hashes[candidates]) >= 0]
        # The n-grams of which this block is the first complete one, and so each n-gram once.
        starts = (candidates[:, None] * size - np.arange(size - 1, -1, -1)).reshape(-1)
        starts = starts[(starts >= 0) & (starts <= len(tokens) - self.n)]
        windows = sliding_window_view(tokens, self.n)
        positions, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for first, last in ranges(0, len(starts), _COMPARED):
            part = starts[first:last]
            grams = windows[part]
            known = _lookup(self.hashes, _hash([grams[:, place] for place in range(self.n)], self.multiplier))
            part, grams, known = part[known >= 0], grams[known >= 0], known[known >= 0]
            expected = sliding_window_view(self.tokens, self.n)[self.first[known]] if len(known) else grams
            is_equal = (grams == expected).all(1)
            positions.append(part[is_equal])
            ids.append(known[is_equal])
        return np.concatenate(positions), np.concatenate(ids)


_ARRAYS = ("tokens", "hashes", "first", "blocks", "filter")


def load_ngrams(folder: Path) -> Ngrams:
    """Map the files of `Ngrams.save` into memory."""
    n, multiplier = np.load(folder / "sizes.npy").tolist()
    return Ngrams(n, multiplier, **{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS})


def index_ngrams(tokens: npt.NDArray[Any], ends: Numbers, n: int) -> tuple[Ngrams, Numbers]:
    """Return the n-grams of documents, and the id of the n-gram that begins at each token; -1: none begins there.

    ends: positions in `tokens` at which the documents end.
    """
    lengths = np.diff(ends, prepend=0)
    end_of_document, length = np.repeat(ends, lengths), np.repeat(lengths, lengths)
    places = np.arange(len(tokens), dtype=np.int64)
    starts = places[places + n <= end_of_document]
    size = (n + 1) // 2
    block_starts = places[(places + size <= end_of_document) & (length >= n)]
    for multiplier in _MULTIPLIERS:
        found, first, inverse = np.unique(_hashes_of(tokens, starts, n, multiplier), return_index=True,
                                          return_inverse=True)
        first, inverse = starts[first], inverse.reshape(-1)
        if _are_equal(tokens, starts, first[inverse], n):
            break
    else:
        raise AssertionError("different n-grams have the same hash, with each of the multipliers")
    blocks = np.unique(_hashes_of(tokens, block_starts, size, multiplier))
    bits = min(max((_FILTER_FACTOR * len(blocks)).bit_length(), _SMALLEST_FILTER), _LARGEST_FILTER)
    table = np.zeros(1 << bits, np.bool_)
    table[(blocks >> np.uint64(64 - bits)).view(np.int64)] = True
    ids = np.full(len(tokens), -1, np.int64)
    ids[starts] = inverse
    return Ngrams(n, multiplier, tokens, found, first, blocks, table), ids


def _hash(columns: list[npt.NDArray[Any]], multiplier: int) -> Hashes:
    """Return the hash of each row, modulo 2^64. columns: the tokens at each place."""
    factor = np.uint64(multiplier)
    hashes = columns[0].astype(np.uint64)
    hashes *= factor
    for column in columns[1:]:
        hashes += column.view(f"u{column.itemsize}")  # uint64 + int32 would be float64
        hashes *= factor
    return hashes


def _hashes_of(tokens: npt.NDArray[Any], starts: Numbers, n: int, multiplier: int) -> Hashes:
    return _hash([tokens[starts + place] for place in range(n)], multiplier) if len(starts) else np.zeros(0, np.uint64)


def _lookup(known: Hashes, hashes: Hashes) -> Numbers:
    """Return the position of each hash in the sorted hashes `known`; -1: it is not there."""
    if not len(known):
        return np.full(len(hashes), -1, np.int64)
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return np.where(known[places] == hashes, places, -1)


def _are_equal(tokens: npt.NDArray[Any], starts: Numbers, others: Numbers, n: int) -> bool:
    """Return whether the n tokens from each of the starts are those from the other one."""
    return all(bool((tokens[starts + place] == tokens[others + place]).all()) for place in range(n))


@dataclass(frozen=True)
class Overlap:
    """N-grams of the evaluation sets that the training data has."""

    most_documents: int
    """n-grams in more training documents are not counted as matches: licenses, menus of web pages and the like"""
    documents_with: Numbers
    """number of training documents that have each n-gram [number of n-grams]"""
    ids: Numbers
    """n-grams that count as matches, sorted, one entry for each training document that has them"""
    documents: Numbers
    """training document of each of these entries"""

    @property
    def matched(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """True for each n-gram that is a match [number of n-grams]."""
        return (self.documents_with > 0) & (self.documents_with <= self.most_documents)

    def contaminated_documents(self) -> Numbers:
        """Return the numbers of the training documents with at least one match, in ascending order."""
        return np.unique(self.documents)

    def documents_of(self, ids: Numbers) -> Numbers:
        """Return the training documents with these n-grams: one for each of the n-grams that it has."""
        lows, highs = np.searchsorted(self.ids, ids, "left"), np.searchsorted(self.ids, ids, "right")
        return np.concatenate([self.documents[:0], *(self.documents[low:high] for low, high in
                                                     zip(lows.tolist(), highs.tolist(), strict=True))])


class _Job(NamedTuple):
    """N-grams that begin at the tokens [start, stop) of consecutive documents."""

    document: int
    bounds: Numbers
    """of these documents, in tokens"""
    start: int
    stop: int


def search(train: IndexedDataset, ngrams: Ngrams, *, most_documents: int, workers: int, advance: Advance) -> Overlap:
    """Search the training data. The memory depends on the n-grams, not on the training data. Raises ConfigError.

    advance: is called with the number of bytes that were searched, and "".
    """
    counts, last_document = np.zeros(ngrams.number, np.int64), np.full(ngrams.number, -1, np.int64)
    ids, documents = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    width = train.dtype.itemsize
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-overlap-") as folder:
        ngrams.save(Path(folder))
        make = functools.partial(_make_find, train.address, folder)
        for job, (found, where) in map_in_order(make, _jobs(train), min(workers, 1 + train.num_tokens // _JOB_TOKENS)):
            is_new = last_document[found] != where  # a long document is searched in several jobs
            found, where = found[is_new], where[is_new]
            is_kept = counts[found] < most_documents  # otherwise it is frequent already
            ids.append(found[is_kept])
            documents.append(where[is_kept])
            counts += np.bincount(found, minlength=ngrams.number)
            last_document[found] = where
            advance((job.stop - job.start) * width, "")
    all_ids, all_documents = np.concatenate(ids), np.concatenate(documents)
    is_match = counts[all_ids] <= most_documents
    all_ids, all_documents = all_ids[is_match], all_documents[is_match]
    order = np.lexsort((all_documents, all_ids))
    return Overlap(most_documents, counts, all_ids[order], all_documents[order])


def _jobs(train: IndexedDataset) -> Iterator[_Job]:
    """Divide the data into jobs of about _JOB_TOKENS tokens: several documents, or a part of a long one."""
    for first, last in ranges(0, train.num_documents, _READ_DOCUMENTS):
        bounds = train.document_offsets(first, last)
        low = 0
        while low < last - first:
            high = max(low + 1, int(np.searchsorted(bounds, bounds[low] + _JOB_TOKENS, "right")) - 1)
            high = min(high, last - first)
            for start, stop in ranges(int(bounds[low]), int(bounds[high]), _JOB_TOKENS):
                yield _Job(first + low, bounds[low : high + 1], start, stop)
            low = high


def _make_find(prefix: str, folder: str) -> Callable[[_Job], tuple[Numbers, Numbers]]:
    """Open the data and the index in a worker process, and return the function that does a job."""
    return functools.partial(_find, IndexedDataset(prefix), load_ngrams(Path(folder)))


def _find(train: IndexedDataset, ngrams: Ngrams, job: _Job) -> tuple[Numbers, Numbers]:
    """Return the ids of the n-grams, and the training document of each: each pair once, by document."""
    stop = min(job.stop + ngrams.n - 1, int(job.bounds[-1]))
    positions, ids = ngrams.find(train.raw_tokens(job.start, stop))
    positions += job.start
    place = np.searchsorted(job.bounds, positions, "right") - 1
    is_inside = (positions + ngrams.n <= job.bounds[place + 1]) & (positions < job.stop)
    place, ids = place[is_inside], ids[is_inside]
    pairs = np.unique(place * ngrams.number + ids)
    return pairs % ngrams.number, pairs // ngrams.number + job.document
