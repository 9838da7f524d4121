"""Samples in the default order, a pure function of (tokens, seed, index).

A range of tokens is divided into windows of seq_length + 1 tokens that overlap by one token. Each epoch starts the
first window at another token and visits the windows in another order. The order is not stored: it is a keyed
permutation that is computed on demand.
"""

import hashlib
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.dataset import Indices, LookAhead, TokenRange
from pretrain.data.token_files.indexed_dataset import IndexedDataset


class ShuffledWindows(TokenRange):
    """Windows of seq_length + 1 tokens from the tokens [first_token, last_token) of a `.bin/.idx` pair.

    Raises ConfigError if the range is shorter than one window.
    """

    has_padding = False

    def __init__(self, indexed: IndexedDataset, *, seq_length: int, seed: int, first_token: int = 0,
                 last_token: int | None = None, name: str = "train") -> None:
        super().__init__(indexed, seq_length=seq_length, seed=seed, first_token=first_token, last_token=last_token,
                         name=name)
        # One window fewer than would fit, so that each epoch has at least seq_length choices for its first token.
        self.samples_per_epoch = max(self.num_tokens // seq_length - 1, 1)
        self.sample_starts = LookAhead(self._compute_starts)

    def samples(self, indices: Indices) -> npt.NDArray[np.integer]:
        """Return samples (indices count over all epochs) as integers [n, seq_length + 1]."""
        return self.indexed.tokens_at(self.sample_starts(np.asarray(indices, np.int64)), self.seq_length + 1)

    def _compute_starts(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of the first tokens of these samples in the flat stream."""
        epochs, positions = np.divmod(indices, self.samples_per_epoch)
        keys = mix(mix(np.array([self.seed & MASK_64], np.uint64)) ^ epochs.astype(np.uint64))
        spare = self.num_tokens - 1 - self.samples_per_epoch * self.seq_length
        shifts = (mix(keys) % np.uint64(spare + 1)).astype(np.int64)
        return self.first_token + shifts + permute(positions, self.samples_per_epoch, keys) * self.seq_length

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of data, token range and seq_length. These and the seed determine the samples."""
        content = f"{self.indexed.fingerprint} {self.first_token} {self.last_token} {self.seq_length}"
        return hashlib.sha256(content.encode()).hexdigest()


MASK_64 = (1 << 64) - 1
_FEISTEL_ROUNDS = 8
_Words = npt.NDArray[np.uint64]


def mix(words: _Words) -> _Words:
    """Hash each element, 64 bits to 64 bits, with SplitMix64."""
    return finalize(words + np.uint64(0x9E3779B97F4A7C15))


def finalize(words: _Words) -> _Words:
    """Overwrite each element with one whose bits all depend on all its bits: the finalizer of SplitMix64."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def permute(indices: npt.NDArray[np.int64], size: int, keys: _Words) -> npt.NDArray[np.int64]:
    """Return the images of `indices` [n] under permutations of range(size), one key [n] for each index.

    The permutation is a Feistel network of range(4^k) with 4^k >= size. It is applied again to each result that is not
    in range(size). Memory is O(n).
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    images = indices.astype(np.uint64)
    pending = np.arange(len(images))
    while len(pending):
        images[pending] = _feistel(images[pending], keys[pending], half)
        pending = pending[images[pending] >= size]
    return images.astype(np.int64)


def _feistel(words: _Words, keys: _Words, half: np.uint64) -> _Words:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = words >> half, words & mask
    for number in range(_FEISTEL_ROUNDS):
        hashed = mix(right * np.uint64(_FEISTEL_ROUNDS) + np.uint64(number))
        hashed ^= keys
        left, right = right, left ^ (mix(hashed) & mask)
    return left << half | right
