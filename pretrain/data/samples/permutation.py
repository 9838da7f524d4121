"""A keyed permutation of range(size) that is computed on demand, without a table."""

import numpy as np
import numpy.typing as npt

MASK_64 = (1 << 64) - 1
_FEISTEL_ROUNDS = 8
_Words = npt.NDArray[np.uint64]


def mix(words: _Words) -> _Words:
    """Hash each element, 64 bits to 64 bits, with the finalizer of SplitMix64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
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
