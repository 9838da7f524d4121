"""Blends of several sources in the order of Megatron-LM and of GPT-NeoX.

Both choose the source of sample n by one loop over all samples (build_blending_indices in helpers.cpp): the source with
the largest weight * max(n, 1) - count, where count is the number of its samples before n. Of equal values, the first
source wins. All values are doubles, so that roundings decide between nearly equal ones.

| | Megatron-LM (megatron/core/datasets, core 0.11 of February 2025 to August 2026) | GPT-NeoX (megatron/data) |
| --- | --- | --- |
| weights | divided by their sum twice: numpy's sum | divided by Python's sum, then by numpy's |
| no weights | numbers of samples of one epoch; each source is read once at most | 1 for each source |
| samples of a source, n of the run | ceil(ceil(n * weight) * 1.005) | ceil(n * weight * 1.005) |
| samples of the blend | sum of ceil(n * weight); without weights: at most n | the sum over all sources, less one each |
| sources with fewer samples than the blend takes | rejected | begin again |

Sources have the run's seed. Megatron-LM before core 0.11 (commit 85676ca4) computed ceil(n * weight * 1.005) for source
and blend, and from core 0.4 to 0.6 (before dc52e84d) divided the weights once. The order of a source differs only if
its number of epochs changes, and the order of the blend only where ties are decided by the last bit of a weight. Not
reproduced: --renormalize-blend-weights of 2024-08 to 2025-02, blends for --full-validation
(build_exhaustive_blending_indices), and GPT-NeoX's weight_by_num_documents.

Compilers may contract weight * n - count into one rounding (FMA). They do not on x86-64, where both programs are
compiled without -march; this module rounds twice, too. On Arm, ties may be decided otherwise.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_SHORTEST_BLOCK = 1024
_WARM_UP = 256  # steps
_Numbers = npt.NDArray[np.int64]
_Doubles = npt.NDArray[np.float64]


def normalized_weights(order: str, weights: Sequence[float]) -> list[float]:
    """Return the weights as the builder of the datasets of "megatron" or "neox" divides them by their sum."""
    if order == "megatron":
        return list((np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))).tolist())
    total = 0.0
    for weight in weights:  # as Python's sum() did until 3.11; later ones compensate the roundings
        total += weight
    return [weight / total for weight in weights]


def samples_of_sources(order: str, weights: Sequence[float], num_samples: int) -> list[int]:
    """Return for each source the number of samples that its own order is made for. `weights` are normalized."""
    if order == "megatron":
        return [math.ceil(math.ceil(num_samples * weight) * (1 + 0.005)) for weight in weights]
    return [math.ceil(num_samples * weight * 1.005) for weight in weights]


class GreedyQuotas:
    """Assigns each sample n = 0, 1, 2, ... to a source, as the loop of Megatron-LM and GPT-NeoX does.

    `num_samples`: length of the blend; samples beyond it begin again at the first one.
    Memory: 1 byte a sample, and 2 bytes with more than 256 sources.

    The loop depends on all its earlier choices. But from different numbers of samples, it soon reaches the same ones:
    after a few steps, rarely after a thousand. Therefore all blocks of samples are computed at the same time, from
    estimated numbers at their beginnings. A block is computed again from the numbers at the end of the block before it
    until these are equal everywhere: the result equals the loop, whatever the estimates were.
    """

    def __init__(self, weights: Sequence[float], num_samples: int) -> None:
        assert num_samples > 0
        self.num_sources, self.num_samples = len(weights), num_samples
        # both programs divide here by numpy's sum
        self._weights = np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))
        self._length = max(_SHORTEST_BLOCK, math.isqrt(num_samples))
        self._before, self._sources = self._choose_all()
        self._ranks = lru_cache(maxsize=2)(self._ranks_of_block)

    def _choose_all(self) -> tuple[_Numbers, npt.NDArray[Any]]:
        """Return the samples of each source before each block [blocks + 1, sources], and the source of each sample."""
        length = self._length
        starts = np.arange(0, self.num_samples, length)
        warm = np.maximum(starts - _WARM_UP, 0)
        counts = self._estimates(warm)
        for step in range(min(_WARM_UP, length)):
            self._choose(np.where(warm + step < starts, warm + step, -1), counts)
        sources = np.empty((len(starts), length), np.uint8 if self.num_sources <= 256 else np.uint16)
        before = np.vstack([counts.T, np.zeros((1, self.num_sources))])
        pending = np.arange(len(starts))
        while len(pending):
            counts = np.ascontiguousarray(before[pending].T)
            chosen = np.empty((length, len(pending)), sources.dtype)
            for step in range(length):
                chosen[step] = self._choose(starts[pending] + step, counts)
            sources[pending] = chosen.T
            following, ends = pending + 1, counts.T
            differs = (before[following] != ends).any(axis=1)
            before[following] = ends
            pending = following[differs & (following < len(starts))]
        return before.astype(np.int64), sources.reshape(-1)[:self.num_samples]

    def _estimates(self, positions: _Numbers) -> _Doubles:
        """Return numbers of samples [sources, n] that are nearly in proportion to the weights, with the right sums."""
        quotas = self._weights * positions[:, None]
        counts = np.floor(quotas)
        missing = positions - counts.sum(axis=1)
        ranks = np.argsort(np.argsort(counts - quotas, axis=1, kind="stable"), axis=1)
        return np.ascontiguousarray((counts + (ranks < missing[:, None])).T)

    def _choose(self, positions: _Numbers, counts: _Doubles) -> npt.NDArray[np.int16]:
        """Return the sources of these samples [n], and count them in `counts` [sources, n]. Below 0: no sample."""
        factors = np.maximum(positions, 1).astype(np.float64)
        largest = self._weights[0] * factors - counts[0]
        chosen = np.zeros(len(positions), np.int16)
        for number in range(1, self.num_sources):
            value = self._weights[number] * factors
            value -= counts[number]
            np.copyto(chosen, number, where=value > largest)
            np.maximum(largest, value, out=largest)
        counts[chosen, np.arange(len(positions))] += positions >= 0
        return chosen

    def locate(self, indices: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return for each sample its source, and how many samples that source had before it."""
        positions = indices % self.num_samples
        blocks, inside = np.divmod(positions, self._length)
        counters = np.empty(len(indices), np.int64)
        numbers = self._sources[positions].astype(np.int64)
        for block in np.unique(blocks).tolist():
            rows = np.flatnonzero(blocks == block)
            counters[rows] = self._before[block, numbers[rows]] + self._ranks(block)[inside[rows]]
        return numbers, counters

    def _ranks_of_block(self, block: int) -> _Numbers:
        """Return how many samples of the block before each one have the same source."""
        own = self._sources[block * self._length:(block + 1) * self._length]
        order = np.argsort(own, kind="stable")
        sizes = np.bincount(own, minlength=self.num_sources)
        ranks = np.empty(len(own), np.int64)
        ranks[order] = np.arange(len(own)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return ranks

    def counts(self, num_samples: int) -> list[int]:
        """Return for each source how many of the first `num_samples` samples it gets."""
        rounds, rest = divmod(num_samples, self.num_samples)
        return list((rounds * self._counts(self.num_samples) + self._counts(rest)).tolist()) if rounds else \
            list(self._counts(rest).tolist())

    def _counts(self, num_samples: int) -> _Numbers:
        block = num_samples // self._length
        if block * self._length >= len(self._sources):
            block = max(len(self._sources) - 1, 0) // self._length
        rest = self._sources[block * self._length:num_samples]
        return self._before[block] + np.bincount(rest, minlength=self.num_sources)
