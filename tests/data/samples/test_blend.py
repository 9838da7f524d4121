"""Blends: exact quotas at any point, each sample of each source once per epoch, phases, and fingerprints."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrain.data.samples.blend import BlendedSamples, Quotas
from pretrain.data.samples.dataset import Indices, SampleDataset

WEIGHT = st.one_of(st.floats(1e-9, 1e9), st.integers(0, 100).map(float), st.decimals(0, 1, places=3).map(float))
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=40).filter(any)


class Numbered:
    """A dataset whose sample i consists of the dataset's number and i."""

    seq_length, has_padding = 1, False

    def __init__(self, number: int, samples_per_epoch: int = 100) -> None:
        self.number, self.samples_per_epoch, self.fingerprint = number, samples_per_epoch, f"data {number}"
        self.num_tokens, self.sources, self.name = samples_per_epoch + 1, (), "train"

    def samples(self, indices: Indices) -> np.ndarray:
        return np.stack([np.full(len(indices), self.number), np.asarray(indices)], axis=1)


def blend(weights: Sequence[float], **options: object) -> BlendedSamples:
    datasets: list[SampleDataset] = [Numbered(number) for number in range(len(weights))]  # type: ignore[misc]
    return BlendedSamples(datasets, weights, **options)  # type: ignore[arg-type]


def deviation(weights: Sequence[float], counts: Sequence[int], num_samples: int) -> float:
    """Return the largest difference between a source's samples and its quota."""
    exact = [Fraction(str(weight)) for weight in weights]
    return float(max(abs(count - weight * num_samples / sum(exact))
                     for count, weight in zip(counts, exact, strict=True)))


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(0, 10**9))
@example([1.0] * 1000, 12_345)
@example([0.0, 1.0, 1e-12], 10**9)
@example([2.0**-i for i in range(40)], 999_999_999)
@example([1e12, 1.0, 1.0], 10**9)
@example([0.3, 0.5, 0.123456789, 0.0765], 10**14)  # beyond any run
def test_each_source_has_its_quota_after_any_number_of_samples(weights: list[float], num_samples: int) -> None:
    quotas = Quotas(weights)
    counts = quotas.counts(num_samples)
    assert sum(counts) == num_samples
    assert deviation(weights, counts, num_samples) <= 2 + num_samples / 2**30
    assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if weight == 0)


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(0, 10**6), st.integers(1, 300))
def test_the_sequence_is_a_pure_function_of_the_index(weights: list[float], first: int, number: int) -> None:
    """Any window of the sequence continues the counters of each source without a gap."""
    quotas = Quotas(weights)
    counts = quotas.counts(first)
    sources, counters = quotas.locate(np.arange(first, first + number))
    for source, counter in zip(sources.tolist(), counters.tolist(), strict=True):
        assert counter == counts[source]
        counts[source] += 1
    assert counts == quotas.counts(first + number)
    shuffled = np.random.default_rng(0).permutation(number)
    again = quotas.locate(first + shuffled)
    assert (again[0] == sources[shuffled]).all()
    assert (again[1] == counters[shuffled]).all()


def test_a_known_sequence() -> None:
    sources, counters = Quotas([0.5, 0.3, 0.2]).locate(np.arange(10))
    assert sources.tolist() == [1, 0, 2, 0, 1, 0, 2, 0, 1, 0]
    assert counters.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_phases_continue_the_counters(data: st.DataObject) -> None:
    num_sources = data.draw(st.integers(1, 6))
    row = st.lists(WEIGHT, min_size=num_sources, max_size=num_sources).filter(any)
    starts = sorted(data.draw(st.sets(st.integers(1, 400), max_size=3)))
    phases = [(0, data.draw(row)), *((start, data.draw(row)) for start in starts)]
    mixed = blend(phases[0][1], schedule=phases[1:])
    expected: list[list[int]] = []
    counts = [0] * num_sources
    for (start, weights), stop in zip(phases, [*starts, 500], strict=True):
        for source in Quotas(weights).locate(np.arange(stop - start))[0].tolist():
            expected.append([source, counts[source]])
            counts[source] += 1
    assert mixed.samples(range(500)).tolist() == expected
    assert mixed.counts(500) == counts
    assert mixed.epochs(0, 500) == [count / 100 for count in counts]
    assert mixed.counts_between(200, 500) == [count - before for count, before in zip(counts, mixed.counts(200),
                                                                                      strict=True)]
    for index in (0, 1, *starts, 499):
        assert mixed.samples([index]).tolist() == [expected[index]]
        assert mixed.counts(index) == [sum(source == number for source, _ in expected[:index])
                                       for number in range(num_sources)]


def test_the_fingerprint_covers_sources_proportions_and_phases() -> None:
    assert blend([1, 1]).fingerprint == blend([50, 50]).fingerprint
    different = [blend([1, 1]), blend([1, 2]), blend([1, 1, 1]), blend([1, 1], schedule=[(10, [1, 2])]),
                 blend([1, 1], schedule=[(11, [1, 2])]), blend([1, 1], schedule=[(10, [2, 1])])]
    assert len({mixed.fingerprint for mixed in different}) == len(different)
