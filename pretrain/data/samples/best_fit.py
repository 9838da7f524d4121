"""Best-fit-decreasing packing of pieces into bins of equal capacity.

The pieces are placed from the largest to the smallest, each into the bin with the least space that is enough; if there
is none, into a new bin (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). Pieces of one size, and bins
with equal space, are interchangeable. Therefore many pieces are placed at once.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


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
