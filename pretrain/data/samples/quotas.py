"""Divide a sequence of samples among sources in proportion to their weights, without a table of the sequence.

The sources are the leaves of a binary tree, built as in Huffman coding: the two lightest nodes become the children of a
new node, again and again. A node sends the fraction p of its samples to its left child: round(p * n) of its first n
samples. Therefore, which child gets a sample, and how many samples the child got before, follow from n alone.

Bound: after n samples, a source has had between weight * n - 2 and weight * n + 2 samples. Each node rounds by at most
1/2. The rounding of an ancestor counts in proportion to the weight of the source in that ancestor. Above its parent,
this weight falls by at least 1/3 with each level, since the sibling of a node weighs at least half as much as the node.
Thus the sum is at most 1/2 + 1/2 * (1 + 2/3 + 4/9 + ...) = 2.

Each p is a fraction with a denominator of at most 2^30. This is exact for the weights that people write, such as 0.3.
For other weights, the bound grows by less than 1 per 2^30 samples.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

_LARGEST_DENOMINATOR = 2**30  # so that products of two such numbers fit into int64
_Numbers = npt.NDArray[np.int64]


class Quotas:
    """Assigns each sample n = 0, 1, 2, ... to a source. `weights` are at least 0, and at least one is above 0."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.num_sources = len(weights)
        # Arrays of the inner nodes. Children: the number of an inner node, or -1 - the number of a source.
        numerators, denominators, left, right = [], [], [], []
        # str: the decimal number that the user wrote, not its nearest binary fraction
        heap = [(Fraction(str(weight)), -1 - number) for number, weight in enumerate(weights) if weight]
        assert heap
        assert all(weight > 0 for weight, _ in heap)
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, light_node), (heavy, heavy_node) = heapq.heappop(heap), heapq.heappop(heap)
            fraction = (heavy / (light + heavy)).limit_denominator(_LARGEST_DENOMINATOR)
            numerators.append(fraction.numerator)
            denominators.append(fraction.denominator)
            left.append(heavy_node)
            right.append(light_node)
            heapq.heappush(heap, (light + heavy, len(left) - 1))
        self._root = heap[0][1]
        self._numerators, self._denominators, self._left, self._right = (
            np.array(column, np.int64) for column in (numerators, denominators, left, right))

    def locate(self, indices: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return for each sample its source, and how many samples that source had before it."""
        nodes, counters = np.full(len(indices), self._root), indices.copy()
        inner = np.flatnonzero(nodes >= 0)
        while len(inner):
            node, count = nodes[inner], counters[inner]
            left_count, goes_left = self._left_count(node, count)
            counters[inner] = np.where(goes_left, left_count, count - left_count)
            nodes[inner] = np.where(goes_left, self._left[node], self._right[node])
            inner = inner[nodes[inner] >= 0]
        return -1 - nodes, counters

    def _left_count(self, nodes: _Numbers, counts: _Numbers) -> tuple[_Numbers, npt.NDArray[np.bool_]]:
        """Return how many of the first `counts` samples go to the left, and whether the next one does."""
        numerator, denominator = self._numerators[nodes], self._denominators[nodes]
        periods, rest = np.divmod(counts, denominator)
        rounded, remainder = np.divmod(2 * rest * numerator + denominator, 2 * denominator)
        return periods * numerator + rounded, remainder + 2 * numerator >= 2 * denominator

    def counts(self, num_samples: int) -> list[int]:
        """Return for each source how many of the first `num_samples` samples it gets."""
        counts = [0] * self.num_sources
        pending = [(self._root, num_samples)]
        while pending:
            node, count = pending.pop()
            if node < 0:
                counts[-1 - node] = count
                continue
            left = int(self._left_count(np.array([node]), np.array([count]))[0][0])
            pending += [(int(self._left[node]), left), (int(self._right[node]), count - left)]
        return counts
