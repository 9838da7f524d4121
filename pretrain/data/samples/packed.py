"""Samples of complete documents, packed by best-fit-decreasing (--packing best_fit).

Documents are divided only if they are longer than a sample. A document of n tokens has the pieces [0, L + 1),
[L, 2L + 1), ..., where L is seq_length: the last token of a piece is also the first token of the next one, as an input
only. Thus each token of a document except its first one is the label of the token before it in exactly one sample. The
first token of a document is a label only if another document precedes it in its sample.

A piece of L + 1 tokens is a sample. Shorter pieces, which end with their document, are packed into samples of L + 1
tokens. The rest of a sample is PADDING.

The documents are divided into blocks, which are packed separately. Each block has documents from all parts of the data:
runs of consecutive documents at regular distances. The number of samples of each block is computed at the start from
the lengths of all documents. A block is packed when one of its samples is read. Each epoch visits the blocks, and the
samples of a block, in another order; the packing does not change.
"""

import hashlib
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.dataset import PADDING, Indices, TokenRange
from pretrain.data.samples.shuffled import MASK_64, mix, permute
from pretrain.data.token_files.indexed_dataset import IndexedDataset

Integers = npt.NDArray[np.int64]

BLOCK_DOCUMENTS = 1 << 17
"""least number of documents of a block. Blocks of more documents take longer to pack; more blocks take longer to
count"""
_MOST_BLOCKS = 1 << 10
_RUN_DOCUMENTS = 64  # consecutive documents of a block
_READ_DOCUMENTS = 1 << 20  # documents whose lengths are read at once at the start


@dataclass(frozen=True)
class _Block:
    """The samples of a block: first from long documents, one piece each, then the packed ones."""

    starts: Integers
    """position of each document's first token [documents]"""
    full_stops: Integers
    """number of pieces of L + 1 tokens up to and including each document [documents]"""
    piece_starts: Integers
    """positions of the shorter pieces, sample after sample [pieces]"""
    piece_lengths: Integers
    bounds: Integers
    """first piece of each packed sample; then the number of pieces"""


class PackedDocuments(TokenRange):
    """Samples of the documents in the tokens [first_token, last_token) of a `.bin/.idx` pair.

    Raises ConfigError if the range is shorter than one sample.
    """

    has_padding = True

    def __init__(self, indexed: IndexedDataset, *, seq_length: int, seed: int, first_token: int = 0,
                 last_token: int | None = None, name: str = "train") -> None:
        super().__init__(indexed, seq_length=seq_length, seed=seed, first_token=first_token, last_token=last_token,
                         name=name)
        self._documents = _find_document(indexed, self.first_token), _find_document(indexed, self.last_token)
        num_blocks = -(-(self._documents[1] - self._documents[0]) // BLOCK_DOCUMENTS)
        self._num_blocks = min(num_blocks, _MOST_BLOCKS)
        self._samples_of_block, filled = self._count_samples()
        self.samples_per_epoch = int(self._samples_of_block.sum())
        self.utilization = filled / (self.samples_per_epoch * (seq_length + 1))
        """fraction of the positions of all samples that have a token"""
        self._lock = threading.Lock()  # of the two caches: threads that need the same block pack it once
        self._block = lru_cache(maxsize=2)(self._pack_block)
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)

    def samples(self, indices: Indices) -> npt.NDArray[np.integer]:
        """Return samples (indices count over all epochs) as integers [n, seq_length + 1], with PADDING at the end."""
        epochs, positions = np.divmod(np.asarray(indices, np.int64), self.samples_per_epoch)
        samples = np.full((len(positions), self.seq_length + 1), PADDING,
                          np.promote_types(self.indexed.dtype, np.int32))
        for epoch in np.unique(epochs).tolist():
            with self._lock:
                order, stops = self._order(epoch)
            ranks = np.searchsorted(stops, positions, side="right")
            for rank in np.unique(ranks[epochs == epoch]).tolist():
                rows = np.flatnonzero((epochs == epoch) & (ranks == rank))
                block = int(order[rank])
                size = int(self._samples_of_block[block])
                keys = mix(self._key(epoch) ^ np.full(len(rows), block + 1, np.uint64))
                bins = permute(positions[rows] - (int(stops[rank]) - size), size, keys)
                with self._lock:
                    packed = self._block(block)
                samples[rows] = self._read_bins(packed, bins, samples.dtype)
        return samples

    def _key(self, epoch: int) -> npt.NDArray[np.uint64]:
        return mix(mix(np.array([self.seed & MASK_64], np.uint64)) ^ np.uint64(epoch))

    def _order_of_epoch(self, epoch: int) -> tuple[Integers, Integers]:
        """Return the blocks in the order of an epoch, and the number of samples up to and including each of them."""
        numbers = np.arange(self._num_blocks)
        order = permute(numbers, self._num_blocks, np.repeat(self._key(epoch), self._num_blocks))
        return order, np.cumsum(self._samples_of_block[order])

    def _count_samples(self) -> tuple[Integers, int]:
        """Return the number of samples of each block, and the number of tokens in all samples."""
        width = self.seq_length + 2
        full, shorter = np.zeros(self._num_blocks, np.int64), np.zeros((self._num_blocks, width), np.int64)
        first, last = self._documents
        for start in range(first, last, _READ_DOCUMENTS):
            stop = min(start + _READ_DOCUMENTS, last)
            num_full, rest = self._divide(np.diff(self.indexed.document_offsets(start, stop)))
            blocks = (np.arange(start - first, stop - first) // _RUN_DOCUMENTS) % self._num_blocks
            full += np.bincount(blocks, num_full, self._num_blocks).astype(np.int64)
            shorter += np.bincount(blocks * width + rest, minlength=shorter.size).reshape(shorter.shape)
        shorter[:, 0] = 0
        filled = int(full.sum()) * (self.seq_length + 1) + int(shorter.sum(axis=0) @ np.arange(width))
        packed = [count_bins(counts, self.seq_length + 1) for counts in shorter]
        return full + np.array(packed, np.int64), filled

    def _divide(self, lengths: Integers) -> tuple[Integers, Integers]:
        """Return the number of pieces of L + 1 tokens of documents, and the size of the last shorter piece, or 0."""
        labels = np.maximum(lengths - 1, 0)
        num_full = labels // self.seq_length
        rest = labels - num_full * self.seq_length
        return num_full, np.where((rest > 0) | ((num_full == 0) & (lengths > 0)), rest + 1, 0)

    def _pack_block(self, block: int) -> _Block:
        first, last = self._documents
        step = self._num_blocks * _RUN_DOCUMENTS
        firsts = range(first + block * _RUN_DOCUMENTS, last, step)
        runs = [(start, min(start + _RUN_DOCUMENTS, last)) for start in firsts]
        if self._num_blocks == 1:
            runs = [(first, last)]
        bounds = [self.indexed.document_offsets(*run) for run in runs]
        starts, stops = np.concatenate([run[:-1] for run in bounds]), np.concatenate([run[1:] for run in bounds])
        num_full, rest = self._divide(stops - starts)
        shorter = np.flatnonzero(rest)
        bins, num_bins = pack_best_fit(rest[shorter], self.seq_length + 1)
        ordered = shorter[np.argsort(bins, kind="stable")]
        pieces_of_bin = np.bincount(bins, minlength=num_bins)
        return _Block(starts, np.cumsum(num_full), stops[ordered] - rest[ordered], rest[ordered],
                      np.concatenate(([0], np.cumsum(pieces_of_bin))))

    def _read_bins(self, block: _Block, bins: Integers, dtype: np.dtype[Any]) -> npt.NDArray[np.integer]:
        """Return these samples of a block."""
        num_full = int(block.full_stops[-1])
        is_full = bins < num_full
        packed = np.where(is_full, 0, bins - num_full)
        counts = np.where(is_full, 1, np.diff(block.bounds)[packed] if len(block.bounds) > 1 else 1)
        stops = np.cumsum(counts)
        rows = np.repeat(np.arange(len(bins)), counts)
        pieces = np.arange(len(rows)) - np.repeat(stops - counts, counts) + block.bounds[packed][rows]
        starts, lengths = np.empty(len(rows), np.int64), np.full(len(rows), self.seq_length + 1)
        shorter = ~is_full[rows]
        starts[shorter], lengths[shorter] = block.piece_starts[pieces[shorter]], block.piece_lengths[pieces[shorter]]
        documents = np.searchsorted(block.full_stops, bins[is_full], side="right")
        numbers = bins[is_full] - np.where(documents > 0, block.full_stops[documents - 1], 0)
        starts[~shorter] = block.starts[documents] + numbers * self.seq_length
        used = np.bincount(rows, lengths, len(bins)).astype(np.int64)
        samples = np.full((len(bins), self.seq_length + 1), PADDING, dtype)
        samples[np.arange(self.seq_length + 1) < used[:, None]] = self.indexed.pieces(starts, lengths)
        return samples

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of data, token range, seq_length and packing. These and the seed determine the samples."""
        content = f"{self.indexed.fingerprint} {self.first_token} {self.last_token} {self.seq_length} best_fit " \
                  f"{self._num_blocks} {_RUN_DOCUMENTS}"
        return hashlib.sha256(content.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records besides the fingerprint."""
        return {**super().record(), "packing": "best_fit"}


def _find_document(indexed: IndexedDataset, token: int) -> int:
    """Return the first document that begins at this token or later, by bisection."""
    return bisect_left(range(indexed.num_documents), token, key=indexed.document_offset)




def count_bins(counts: Integers, capacity: int) -> int:
    """Return the number of bins for counts[i] pieces of size i, i from 1 to `capacity`."""
    return sum(bins for _, space, bins, _ in _placements(counts, capacity) if space == capacity)


def pack_best_fit(sizes: Integers, capacity: int) -> tuple[Integers, int]:
    """Return the bin of each piece [n], and the number of bins. The sizes are between 1 and `capacity`."""
    bins_by_size = np.empty(len(sizes), np.int64)
    bins_with: dict[int, list[Integers]] = {}  # space -> numbers of bins
    placed, num_bins = 0, 0
    for size, space, number, each in _placements(np.bincount(sizes, minlength=capacity + 1), capacity):
        if space == capacity:
            chosen = np.arange(num_bins, num_bins + number)
            num_bins += number
        else:
            chosen = _take(bins_with[space], number)
        bins_by_size[placed : placed + number * each] = np.repeat(chosen, each)
        placed += number * each
        bins_with.setdefault(space - size * each, []).append(chosen)
    bins = np.empty(len(sizes), np.int64)
    bins[np.argsort(-sizes, kind="stable")] = bins_by_size
    return bins, num_bins


def _take(arrays: list[Integers], number: int) -> Integers:
    """Remove `number` values from the end of a list of arrays, and return them."""
    taken: list[Integers] = []
    while number:
        last = arrays.pop()
        if len(last) > number:
            arrays.append(last[:-number])
            last = last[-number:]
        taken.append(last)
        number -= len(last)
    return np.concatenate(taken)


def _placements(counts: Integers, capacity: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (size, space, bins, each): put `each` pieces of this size into each of `bins` bins with this space.

    Bins with space `capacity` are new ones.
    """
    bins_with = [0] * (capacity + 1)
    spaces = 0  # bit i is set if bins_with[i] > 0: the least sufficient space is the lowest bit from `size` on
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            sufficient = spaces >> size
            space = size + (sufficient & -sufficient).bit_length() - 1 if sufficient else capacity
            each = min(space // size, left)
            number = left // each if space == capacity else min(left // each, bins_with[space])
            yield size, space, number, each
            left -= number * each
            if space < capacity:
                bins_with[space] -= number
                if not bins_with[space]:
                    spaces &= ~(1 << space)
            rest = space - size * each
            if rest:
                bins_with[rest] += number
                spaces |= 1 << rest
