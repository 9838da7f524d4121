"""Blends of several sources with exact quotas, without a table of the sequence of sources.

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

import hashlib
import heapq
import itertools
import json
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pretrain.daemon_threads import DaemonThreads
from pretrain.data.samples.dataset import Indices, LookAhead, SampleDataset
from pretrain.data.token_files.indexed_dataset import IndexedDataset

_LARGEST_DENOMINATOR = 2**30  # so that products of two such numbers fit into int64
_READ_AT_ONCE = 16  # sources
_Numbers = npt.NDArray[np.int64]


class Assignment(Protocol):
    """Assigns each sample n = 0, 1, 2, ... of a blend to a source."""

    def locate(self, indices: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return for each sample its source, and how many samples that source had before it."""

    def counts(self, num_samples: int) -> list[int]:
        """Return for each source how many of the first `num_samples` samples it gets."""


class FiniteAssignment(Assignment, Protocol):
    """Begins again at the first sample after `num_samples`."""

    num_samples: int


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


class BlendedSamples:
    """Samples of several datasets in proportion to their weights.

    After any number n of samples, each dataset has contributed weight * n samples, within 2 (see above). Each
    dataset is read in its own order by its own counter, thus each has its own epochs.

    `schedule`: from this number of samples on, these weights. The counters continue from phase to phase.
    `planned`: in an order of an extension, the assignment of the samples, and the number of samples that the run was
    planned to read. There is no schedule then.
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[float], *,
                 schedule: Sequence[tuple[int, Sequence[float]]] = (), name: str = "train",
                 planned: tuple[FiniteAssignment, int] | None = None) -> None:
        assert len({data.seq_length for data in datasets}) == 1
        assert not (schedule and planned)
        assert all(len(datasets) == len(row) for row in (weights, *(row for _, row in schedule)))
        self.datasets, self.name, self.seq_length = tuple(datasets), name, datasets[0].seq_length
        self.weights, self.schedule = tuple(weights), tuple((start, tuple(row)) for start, row in schedule)
        self._starts = np.array([0, *(start for start, _ in self.schedule)], np.int64)
        assert bool((np.diff(self._starts) > 0).all()), "phases begin at rising numbers of samples above 0"
        self._phases: list[Assignment] = \
            [planned[0]] if planned else [Quotas(row) for row in (weights, *(row for _, row in self.schedule))]
        self.order_samples = planned[1] if planned else None
        self.order_length = planned[0].num_samples if planned else None
        """samples after which the order begins again; None: never"""
        before = [np.zeros(len(datasets), np.int64)]
        for quotas, length in zip(self._phases, np.diff(self._starts).tolist(), strict=False):
            before.append(before[-1] + np.array(quotas.counts(length), np.int64))
        self._before = before  # samples of each dataset before each phase
        self.locate = LookAhead(self._locate)
        # data in an object store is requested at the same time from all sources
        self._threads = DaemonThreads(_READ_AT_ONCE, name="blend") if any(
            source.is_remote for source in self.sources) else None
        self.has_padding = any(data.has_padding for data in datasets)
        # Samples until each dataset would have been read once, if each were read in proportion to its size.
        self.samples_per_epoch = sum(data.samples_per_epoch for data in datasets)

    @property
    def sources(self) -> tuple[IndexedDataset, ...]:
        return tuple(source for data in self.datasets for source in data.sources)

    @property
    def num_tokens(self) -> int:
        return sum(data.num_tokens for data in self.datasets)

    def samples(self, indices: Indices) -> npt.NDArray[np.integer]:
        """Return samples as integers [n, seq_length + 1]."""
        numbers, counters = self.locate(np.asarray(indices, np.int64))
        if len(numbers) == 1:
            return self.datasets[int(numbers[0])].samples(counters)
        by_dataset = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(numbers[by_dataset], prepend=-1, append=-1)).tolist()
        rows = [by_dataset[first:last] for first, last in itertools.pairwise(bounds)]
        if self._threads is None:
            parts = [self.datasets[int(numbers[own[0]])].samples(counters[own]) for own in rows]
        else:
            futures = [self._threads.submit(self.datasets[int(numbers[own[0]])].samples, counters[own]) for own in rows]
            parts = [future.result() for future in futures]
        samples = np.empty((len(numbers), self.seq_length + 1), np.result_type(*parts))
        for own, part in zip(rows, parts, strict=True):
            samples[own] = part
        return samples

    def _locate(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return [2, n]: for each sample the number of its dataset, and its index in that dataset."""
        phase_of_index = np.searchsorted(self._starts, indices, side="right") - 1
        located = np.empty((2, len(indices)), np.int64)
        numbers, counters = located
        for phase in np.unique(phase_of_index).tolist():
            rows = np.flatnonzero(phase_of_index == phase)
            numbers[rows], counters[rows] = self._phases[phase].locate(indices[rows] - self._starts[phase])
            counters[rows] += self._before[phase][numbers[rows]]
        return located

    def counts(self, num_samples: int) -> list[int]:
        """Return for each dataset how many of the first `num_samples` samples it gives."""
        phase = int(np.searchsorted(self._starts, num_samples, side="right")) - 1
        counts = self._phases[phase].counts(num_samples - int(self._starts[phase]))
        return [before + count for before, count in zip(self._before[phase].tolist(), counts, strict=True)]

    def counts_between(self, first: int, last: int) -> list[int]:
        """Return for each dataset how many of the samples [first, last) it gives."""
        return [after - before for before, after in zip(self.counts(first), self.counts(last), strict=True)]

    def epochs(self, first: int, last: int) -> list[float]:
        """Return how often the samples [first, last) read each dataset."""
        return [count / data.samples_per_epoch
                for count, data in zip(self.counts_between(first, last), self.datasets, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the fingerprints of the datasets, the weights and the schedule."""
        return self.fingerprint_with(self._proportions()["proportions"])

    def fingerprint_with(self, proportions: list[dict[str, Any]]) -> str:
        """Return the fingerprint of these datasets with other weights, as `record` has them."""
        content = {"blend": [data.fingerprint for data in self.datasets], "proportions": proportions}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records besides the fingerprint."""
        planned = {} if self.order_samples is None else {"order_samples": self.order_samples}
        return {"sources": [{"prefix": str(data.sources[0].prefix), **data.record()} for data in self.datasets],
                **planned, **self._proportions()}

    def _proportions(self) -> dict[str, Any]:
        # Equal proportions give equal fingerprints: the weights 1 1 and 50 50 are the same blend.
        phases = [(start, [weight / sum(row) for weight in row]) for start, row in ((0, self.weights), *self.schedule)]
        return {"proportions": [{"from_samples": start, "weights": row} for start, row in phases]}
