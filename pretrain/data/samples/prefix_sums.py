"""Sums of all lengths before an element, from a table with an entry for every 64th element."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_BLOCK = 64
_BLOCKS_AT_ONCE = 2**16  # lengths of 4 Mi elements
_Numbers = npt.NDArray[np.int64]


class PrefixSums:
    """Positions of elements that lie one behind another. `lengths(numbers)` returns the lengths of these elements.

    A table of all positions would take 8 bytes for each element. This one takes 1/8 byte.
    """

    def __init__(self, num_elements: int, lengths: Callable[[_Numbers], npt.NDArray[np.integer]]) -> None:
        self.num_elements, self._lengths = num_elements, lengths
        num_blocks = -(-num_elements // _BLOCK)
        sums = [self._block_lengths(np.arange(first, min(first + _BLOCKS_AT_ONCE, num_blocks))).sum(axis=1)
                for first in range(0, num_blocks, _BLOCKS_AT_ONCE)]
        self._blocks = np.concatenate([np.zeros(1, np.int64), *sums]).cumsum()

    @property
    def total(self) -> int:
        return int(self._blocks[-1])

    def find(self, positions: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return for each position the element that it lies in, and the sum of all lengths before that element."""
        blocks = np.searchsorted(self._blocks, positions, side="right") - 1
        ends = self._blocks[blocks, None] + self._block_lengths(blocks).cumsum(axis=1)
        inside = (ends <= positions[:, None]).sum(axis=1)
        before = np.where(inside > 0, ends[np.arange(len(ends)), inside - 1], self._blocks[blocks])
        return blocks * _BLOCK + inside, before

    def before(self, elements: _Numbers) -> _Numbers:
        """Return for each element the sum of all lengths before it."""
        blocks, inside = np.divmod(elements, _BLOCK)
        counted = np.arange(_BLOCK) < inside[:, None]
        return self._blocks[blocks] + (self._block_lengths(blocks) * counted).sum(axis=1)

    def _block_lengths(self, blocks: _Numbers) -> _Numbers:
        """Return the lengths of the elements of blocks [n] as [n, 64]; 0 after the last element."""
        elements = blocks[:, None] * _BLOCK + np.arange(_BLOCK)
        lengths = self._lengths(np.minimum(elements, self.num_elements - 1)).astype(np.int64)
        return np.where(elements < self.num_elements, lengths, 0)
