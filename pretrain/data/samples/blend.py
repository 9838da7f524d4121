"""Blends of several sources with exact quotas."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.dataset import Indices, LookAhead, SampleDataset
from pretrain.data.samples.quotas import Quotas
from pretrain.data.token_files.indexed_dataset import IndexedDataset


class BlendedSamples:
    """Samples of several datasets in proportion to their weights.

    After any number n of samples, each dataset has contributed weight * n samples, within 2 (see quotas.py). Each
    dataset is read in its own order by its own counter, thus each has its own epochs.

    `schedule`: from this number of samples on, these weights. The counters continue from phase to phase.
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[float], *,
                 schedule: Sequence[tuple[int, Sequence[float]]] = (), name: str = "train") -> None:
        assert len({data.seq_length for data in datasets}) == 1
        assert all(len(datasets) == len(row) for row in (weights, *(row for _, row in schedule)))
        self.datasets, self.name, self.seq_length = tuple(datasets), name, datasets[0].seq_length
        self.weights, self.schedule = tuple(weights), tuple((start, tuple(row)) for start, row in schedule)
        self._starts = np.array([0, *(start for start, _ in self.schedule)], np.int64)
        assert bool((np.diff(self._starts) > 0).all()), "phases begin at rising numbers of samples above 0"
        self._phases = [Quotas(row) for row in (weights, *(row for _, row in self.schedule))]
        before = [np.zeros(len(datasets), np.int64)]
        for quotas, length in zip(self._phases, np.diff(self._starts).tolist(), strict=False):
            before.append(before[-1] + np.array(quotas.counts(length), np.int64))
        self._before = before  # samples of each dataset before each phase
        self.locate = LookAhead(self._locate)
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
        parts = [self.datasets[int(numbers[own[0]])].samples(counters[own]) for own in rows]
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
        return {"sources": [{"prefix": str(data.sources[0].prefix), **data.record()} for data in self.datasets],
                **self._proportions()}

    def _proportions(self) -> dict[str, Any]:
        # Equal proportions give equal fingerprints: the weights 1 1 and 50 50 are the same blend.
        phases = [(start, [weight / sum(row) for weight in row]) for start, row in ((0, self.weights), *self.schedule)]
        return {"proportions": [{"from_samples": start, "weights": row} for start, row in phases]}
