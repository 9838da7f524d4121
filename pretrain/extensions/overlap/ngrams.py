"""An index of the n-grams of evaluation sets, and the search for them in tokens.

The search does not hash each n-gram of the tokens. With s = (n + 1) // 2, the tokens are divided into blocks of s. Each
n-gram contains a complete block. So only n-grams around a block that the evaluation sets have are hashed, and
compared token by token if the hash is known.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from pretrain.data.token_files.index_file import ranges

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xF1357AEA2E62A9C5)  # odd
_SMALLEST_FILTER, _LARGEST_FILTER = 16, 28  # bits: a table of 64 KiB to 256 MiB
_FILTER_FACTOR = 16  # bytes of the filter per block: 1 of 16 other blocks passes it
_PART_TOKENS = 1 << 18  # searched at once, so that the intermediate values fit into a core's cache
_COMPARED = 1 << 18  # n-grams that are compared token by token at once


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
