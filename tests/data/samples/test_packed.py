"""Best-fit packing: no token is lost or repeated, for random documents, seeds and sample lengths."""

import itertools
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.data_spec import parse_data_spec
from pretrain.data.loader import Loader
from pretrain.data.open_datasets import open_datasets
from pretrain.data.samples import packed
from pretrain.data.samples.dataset import PADDING
from pretrain.data.samples.packed import PackedDocuments, count_bins, pack_best_fit
from pretrain.errors import ConfigError
from tests.data.counting import write_counting

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), min_size=1, max_size=60)
FRACTION = st.floats(0, 1, allow_subnormal=False)  # after -ffast-math the processor has none
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def slow_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Return the space that remains in each bin, with a search over all bins for each piece."""
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, space in enumerate(spaces) if space >= size]
        if not fitting:
            spaces.append(capacity)
            fitting = [len(spaces) - 1]
        spaces[min(fitting, key=lambda number: spaces[number])] -= size
    return spaces


@EXAMPLES
@given(sizes=st.lists(st.integers(1, 40), max_size=80), capacity=st.integers(40, 50))
def test_packing_is_best_fit_decreasing(sizes: list[int], capacity: int) -> None:
    bins, num_bins = pack_best_fit(np.array(sizes, np.int64), capacity)
    spaces = capacity - np.bincount(bins, sizes, num_bins).astype(np.int64)
    assert sorted(spaces.tolist()) == sorted(slow_best_fit(sizes, capacity))
    counts = np.bincount(np.array(sizes, np.int64), minlength=capacity + 1)
    assert count_bins(counts, capacity) == num_bins


@EXAMPLES
@given(lengths=LENGTHS, seq_length=st.integers(1, 30), seed=st.integers(-5, 2**65), cuts=st.tuples(
    FRACTION, FRACTION), block=st.integers(1, 20), run=st.integers(1, 3), data=st.data())
def test_no_token_is_lost_or_repeated(lengths: list[int], seq_length: int, seed: int, cuts: tuple[float, float],
                                      block: int, run: int, data: st.DataObject) -> None:
    """Each token is followed by its successor in its document in exactly one sample of each epoch."""
    first, last = sorted(round(cut * len(lengths)) for cut in cuts)
    bounds = np.concatenate(([0], np.cumsum(lengths))).tolist()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK_DOCUMENTS", block * run), ("_RUN_DOCUMENTS", run), ("_READ_DOCUMENTS", 7),
                            ("_MOST_BLOCKS", 5)):
            patch.setattr(packed, name, value)
        indexed = write_counting(Path(folder) / "data", lengths, first=1)

        def open_packed() -> PackedDocuments:
            return PackedDocuments(indexed, seq_length=seq_length, seed=seed, first_token=bounds[first],
                                   last_token=bounds[last])

        if bounds[last] - bounds[first] < seq_length + 1:
            with pytest.raises(ConfigError, match="for one sample"):
                open_packed()
            return
        dataset = open_packed()
        size = dataset.samples_per_epoch
        epochs = [dataset.samples(np.arange(epoch * size, (epoch + 1) * size)) for epoch in range(2)]
        index = data.draw(st.integers(0, 2 * size - 1))
        assert open_packed().samples([index])[0].tolist() == np.concatenate(epochs)[index].tolist()
    documents = [range(start + 1, stop + 1) for start, stop in itertools.pairwise(bounds[first : last + 1])]
    check_epoch(epochs[0], documents, seq_length)
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist())
    assert dataset.utilization == pytest.approx(float((epochs[0] != PADDING).mean()))


def check_epoch(samples: np.ndarray, documents: list[range], seq_length: int) -> None:
    """Check that each document is complete, that only long ones are divided, and that padding ends a sample."""
    assert samples.shape[1] == seq_length + 1
    lasts = {document[-1] for document in documents if document}
    links: Counter[tuple[int, int]] = Counter()
    seen: Counter[int] = Counter()
    for row in samples.tolist():
        tokens = [token for token in row if token != PADDING]
        assert tokens
        assert row == tokens + [PADDING] * (len(row) - len(tokens))
        assert len(tokens) == len(row) or tokens[-1] in lasts, "a piece without its end must fill its sample"
        seen.update(tokens)
        links.update((token, label) for token, label in itertools.pairwise(tokens) if token not in lasts)
    assert links == Counter(pair for document in documents for pair in itertools.pairwise(document))
    repeated = {token: 2 for document in documents for token in document[seq_length:-1:seq_length]}
    assert seen == Counter({token: 1 for document in documents for token in document} | repeated)


def test_each_epoch_has_another_order(tmp_path: Path) -> None:
    dataset = PackedDocuments(write_counting(tmp_path / "data", [9] * 64, first=1), seq_length=8, seed=1)
    orders = [dataset.samples(range(64 * epoch, 64 * (epoch + 1)))[:, 0].tolist() for epoch in range(3)]
    orders.append(PackedDocuments(dataset.indexed, seq_length=8, seed=2).samples(range(64))[:, 0].tolist())
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


@pytest.mark.parametrize("seq_length", [512, 4096])
def test_utilization_of_a_corpus_like_text(tmp_path: Path, seq_length: int) -> None:
    """Lengths of documents of web text are distributed about log-normally."""
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 5000).astype(int) + 1
    indexed = write_counting(tmp_path / "data", lengths.tolist(), first=1)
    assert PackedDocuments(indexed, seq_length=seq_length, seed=0).utilization > 0.98


def test_the_flag_selects_packing(tmp_path: Path) -> None:
    lengths = [30, 5, 80, 2] * 10
    write_counting(tmp_path / "data", lengths, first=1)
    spec = parse_data_spec(str(tmp_path / "data"), split="80,20", packing="best_fit")
    datasets = open_datasets(spec, seq_length=16, seed=0)
    assert {name: type(data) for name, data in datasets.items()} == dict.fromkeys(("train", "valid"), PackedDocuments)
    assert datasets["train"].num_tokens == sum(lengths[:32])
    assert datasets["train"].record()["packing"] == "best_fit"
    with pytest.raises(ConfigError, match=r"--packing best_fit: --sample_order neox has no packing"):
        parse_data_spec(str(tmp_path / "data"), sample_order="neox", packing="best_fit")


@pytest.mark.parametrize("eod_token", [None, 3])
def test_padding_is_no_label_and_every_other_label_has_the_same_weight(tmp_path: Path, eod_token: int | None) -> None:
    """Two ranks, two micro-batches: the weights of a global batch sum to micro-batches times ranks."""
    indexed = write_counting(tmp_path / "data", [7, 7, 3, 7, 7, 12], first=1)
    dataset = PackedDocuments(indexed, seq_length=8, seed=0)
    loaders = [Loader(dataset, micro_batch_size=1, gradient_accumulation_steps=2, data_parallel_rank=rank,
                      data_parallel_size=2, eod_token=eod_token) for rank in range(2)]
    samples = torch.from_numpy(dataset.samples(range(4)).astype(np.int64))
    counted = samples[:, 1:] != PADDING
    if eod_token is not None:
        counted &= samples[:, :-1] != eod_token
    assert 0 < counted.sum() < counted.numel()
    for loader in loaders:
        loader._sum_over_data_parallel = lambda count: counted.sum()
    batches = [loader.step(0) for loader in loaders]
    for loader in loaders:
        loader.close()
    found = [batches[rank][number] for number in range(2) for rank in range(2)]  # in the order of the samples
    tokens, labels, weights = (torch.cat([pick(batch) for batch in found]) for pick in
                               (lambda batch: batch[0], lambda batch: batch[1][0], lambda batch: batch[1][1]))
    assert torch.equal(weights != 0, counted)
    assert torch.allclose(weights[counted], torch.tensor(4 / float(counted.sum())))
    is_token = samples[:, :-1] != PADDING
    assert torch.equal(tokens[is_token], samples[:, :-1][is_token])
    assert torch.equal(labels[counted], samples[:, 1:][counted])
    assert set(tokens[~is_token].tolist()) <= {eod_token or 0}
    assert int(labels.min()) >= 0
