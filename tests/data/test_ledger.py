"""Samples that a run consumes: the same for any layout and after any resume; none is lost or repeated in an epoch."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.loader import Loader
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.shuffled import ShuffledWindows
from tests.data.counting import write_counting
from tests.support.extensions import modules_of_extensions

LAYOUT = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
"""data-parallel ranks, micro-batch size, gradient accumulation steps"""


def sources(folder: Path, data: st.DataObject, seq_length: int) -> list[SampleDataset]:
    """Return datasets of the files, also in the orders of extensions."""
    of_extensions = [each.ordered_samples for each in modules_of_extensions("sample_orders")]
    ordered = data.draw(st.sampled_from([None, *of_extensions]), label="order")
    corpora = data.draw(st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=40), min_size=1, max_size=4))
    datasets: list[SampleDataset] = []
    for number, lengths in enumerate(corpora):
        lengths.append(2 * seq_length + 2)
        indexed = write_counting(folder / f"source{number}", lengths, first=number * 10**6)
        datasets.append(ShuffledWindows(indexed, seq_length=seq_length, seed=number) if ordered is None else
                        ordered(indexed, seq_length, number, data))
    return datasets


def consumed(dataset: SampleDataset, layout: tuple[int, int, int], first: int, steps: int) -> list[list[int]]:
    """Return the samples that all ranks read from `first` on, in the order of the global batches."""
    ranks, micro_batch, accumulation = layout
    loaders = [Loader(dataset, micro_batch_size=micro_batch, gradient_accumulation_steps=accumulation,
                      data_parallel_rank=rank, data_parallel_size=ranks) for rank in range(ranks)]
    samples = []
    for step in range(steps):
        batches = [loader.step(first + step * loader.global_batch_size) for loader in loaders]
        for number in range(accumulation):
            for tokens, (labels, _) in (batches[rank][number] for rank in range(ranks)):
                samples += np.concatenate([tokens.numpy(), labels.numpy()[:, -1:]], axis=1).tolist()
    for loader in loaders:
        loader.close()
    return samples


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_layout_and_any_resume_consume_the_same_samples(tmp_path_factory: pytest.TempPathFactory,
                                                            data: st.DataObject) -> None:
    seq_length = data.draw(st.integers(2, 12), label="seq_length")
    datasets = sources(tmp_path_factory.mktemp("ledger"), data, seq_length)
    weights = data.draw(st.lists(st.floats(0.01, 5), min_size=len(datasets), max_size=len(datasets)))
    schedule = [(data.draw(st.integers(1, 60)), weights[::-1])] if data.draw(st.booleans()) else []
    dataset = BlendedSamples(datasets, weights, schedule=schedule) if len(datasets) > 1 else datasets[0]
    starts = data.draw(st.lists(st.tuples(LAYOUT, st.integers(1, 4)), min_size=1, max_size=4), label="starts of a run")
    ledger: list[list[int]] = []
    for layout, steps in starts:  # each start of the run has another layout, and is killed after some steps
        ledger += consumed(dataset, layout, len(ledger), steps)
    assert ledger == [dataset.samples([index])[0].tolist() for index in range(len(ledger))]
    if isinstance(dataset, BlendedSamples):
        read = Counter(sample[0] // 10**6 for sample in ledger)
        assert [read[number] for number in range(len(datasets))] == dataset.counts(len(ledger))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_no_sample_of_a_source_is_lost_or_repeated_in_an_epoch(tmp_path_factory: pytest.TempPathFactory,
                                                               data: st.DataObject) -> None:
    """In the default order, each epoch of each source reads windows that do not overlap, and as many as fit."""
    seq_length = data.draw(st.integers(2, 12), label="seq_length")
    folder = tmp_path_factory.mktemp("epochs")
    corpora = data.draw(st.lists(st.integers(2 * seq_length + 2, 300), min_size=1, max_size=4), label="tokens")
    indexed = [write_counting(folder / f"source{number}", [tokens], first=number * 10**6)
               for number, tokens in enumerate(corpora)]
    datasets = [ShuffledWindows(source, seq_length=seq_length, seed=data.draw(st.integers(0, 99)))
                for source in indexed]
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=len(datasets), max_size=len(datasets)))
    blend = BlendedSamples(datasets, weights)
    ledger = consumed(blend, data.draw(LAYOUT), 0, 12)
    for number, dataset in enumerate(datasets):
        own = [sample[0] - number * 10**6 for sample in ledger if sample[0] // 10**6 == number]
        for first in range(0, len(own), dataset.samples_per_epoch):
            epoch = sorted(own[first:first + dataset.samples_per_epoch])
            assert all(after - before >= seq_length for before, after in itertools.pairwise(epoch))
            if len(epoch) == dataset.samples_per_epoch:
                assert corpora[number] - 1 - len(epoch) * seq_length < 2 * seq_length, "tokens that no sample has"
