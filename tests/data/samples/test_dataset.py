"""Samples and splits."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.data.datasets.data_spec import parse_data_spec
from pretrain.data.datasets.open_datasets import open_datasets
from pretrain.data.datasets.split import parse_split, split_documents
from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.files.writer import IndexedWriter
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.errors import ConfigError


def write_counting(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Write documents with consecutive numbers as tokens. With `first` 0, each token equals its position."""
    with IndexedWriter(prefix, "int32") as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
        writer.finalize()
    return str(prefix)


@pytest.fixture
def counting(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_counting(tmp_path / "data", [100] * 10))


@pytest.mark.parametrize("seq_length", [1, 7, 8, 64, 499, 999])
def test_each_epoch_visits_each_window_once(counting: IndexedDataset, seq_length: int) -> None:
    data = ShuffledWindows(counting, seq_length=seq_length, seed=1)
    for epoch in range(4):
        first = epoch * data.samples_per_epoch
        starts = sorted(data.sample_starts(first + np.arange(data.samples_per_epoch)).tolist())
        assert set(np.diff(starts)) <= {seq_length}
        assert 0 <= starts[0] <= starts[-1] <= 1000 - seq_length - 1
        assert 999 - (starts[-1] - starts[0] + seq_length) < 2 * seq_length, "too many tokens are unused"


def test_a_sample_has_the_tokens_of_its_window(counting: IndexedDataset) -> None:
    data = ShuffledWindows(counting, seq_length=8, seed=1)
    start = int(data.sample_starts(np.array([5]))[0])
    assert data.samples([5])[0].tolist() == list(range(start, start + 9))
    assert data.samples([5])[0].dtype == counting.dtype


def test_order_and_start_change_with_epoch_and_seed(counting: IndexedDataset) -> None:
    def starts(seed: int, epoch: int) -> list[int]:
        data = ShuffledWindows(counting, seq_length=8, seed=seed)
        return data.sample_starts(epoch * data.samples_per_epoch + np.arange(data.samples_per_epoch)).tolist()

    orders = [starts(seed, epoch) for seed in (0, 1, -1, 2**70) for epoch in range(8)]
    assert len({tuple(np.argsort(order)) for order in orders[:24]}) == 24
    assert len({min(order) for order in orders[:8]}) > 3, "epochs should start at different tokens"
    assert starts(1, 0) == starts(1, 0)


def test_all_tokens_are_seen_over_the_epochs(counting: IndexedDataset) -> None:
    data = ShuffledWindows(counting, seq_length=8, seed=3)
    seen = {int(token) for index in range(40 * data.samples_per_epoch) for token in data.samples([index])[0]}
    assert seen == set(range(1000))


def test_windows_stay_in_their_range(counting: IndexedDataset) -> None:
    data = ShuffledWindows(counting, seq_length=8, seed=1, first_token=300, last_token=350)
    tokens = np.concatenate([data.samples([index])[0] for index in range(200)])
    assert (tokens.min(), tokens.max()) == (300, 349)


def test_the_smallest_dataset_has_one_sample(counting: IndexedDataset) -> None:
    data = ShuffledWindows(counting, seq_length=8, seed=1, first_token=5, last_token=14)
    assert data.samples_per_epoch == 1
    assert data.samples([0])[0].tolist() == data.samples([77])[0].tolist() == list(range(5, 14))
    with pytest.raises(ConfigError, match="found 8 tokens; expected at least 9 for one sample"):
        ShuffledWindows(counting, seq_length=8, seed=1, first_token=5, last_token=13)


def test_the_fingerprint_depends_on_tokens_length_and_range(tmp_path: Path, counting: IndexedDataset) -> None:
    def of(data: IndexedDataset, **changes: int) -> str:
        return ShuffledWindows(data, **{"seq_length": 8, "seed": 1, **changes}).fingerprint

    same = IndexedDataset(write_counting(tmp_path / "same", [100] * 10))
    other = IndexedDataset(write_counting(tmp_path / "other", [100] * 10, first=1))
    assert of(counting) == of(same) == of(counting, seed=2)
    different = [of(counting), of(other), of(counting, seq_length=9), of(counting, last_token=999)]
    assert len(set(different)) == 4


def test_splits_equal_those_of_megatron() -> None:
    assert split_documents(1000, parse_split("969,30,1")) == [(0, 969), (969, 999), (999, 1000)]
    assert split_documents(10, parse_split("1,1,1")) == [(0, 4), (4, 7), (7, 10)]
    assert split_documents(1, parse_split("969,30,1")) == [(0, 1), (1, 1), (1, 1)]
    assert split_documents(7, parse_split("0.9,0.1")) == [(0, 6), (6, 7), (7, 7)]
    assert split_documents(7, parse_split("1")) == [(0, 7), (7, 7), (7, 7)]


@pytest.mark.parametrize("split", ["", "a,b", "0,1,1", "-1,2,0", "1,2,3,4", "nan,1,1", "inf,1,1", "969 30 1"])
def test_bad_splits_are_rejected(split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_split(split)


def ranges(train_data: str, *, split: str = "969,30,1", **own: str) -> dict[str, tuple[int, int]]:
    datasets = open_datasets(parse_data_spec(train_data, split=split, **own), seq_length=8, seed=1234)
    return {name: (data.first_token, data.last_token) for name, data in datasets.items()}


def test_open_datasets_splits_by_documents(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "data", [100] * 10)
    assert ranges(prefix, split="8,1,1") == {"train": (0, 800), "valid": (800, 900), "test": (900, 1000)}
    assert ranges(prefix, split="9,1") == {"train": (0, 900), "valid": (900, 1000)}
    assert ranges(prefix, split="1") == {"train": (0, 1000)}


def test_separate_validation_data_leaves_all_documents_to_training(tmp_path: Path) -> None:
    prefix, valid = write_counting(tmp_path / "data", [100] * 10), write_counting(tmp_path / "valid", [50])
    own = ranges(prefix, valid_data=valid, split="9,5,1")
    assert own == {"train": (0, 900), "valid": (0, 50), "test": (900, 1000)}
    assert ranges(prefix, valid_data=valid) == {"train": (0, 1000), "valid": (0, 50)}
    both = ranges(prefix, valid_data=valid, test_data=valid, split="8,1,1")
    assert both == {"train": (0, 1000), "valid": (0, 50), "test": (0, 50)}


def test_missing_and_short_datasets_are_rejected(tmp_path: Path) -> None:
    short = write_counting(tmp_path / "short", [100, 100, 5])
    with pytest.raises(ConfigError, match=r"short \(valid\): found 5 tokens; expected at least 9 .*--split"):
        ranges(short, split="2,1")
    assert ranges(short, split="2,0,1") == {"train": (0, 200)}, "too few tokens for a test set"
    with pytest.raises(ConfigError, match="--train_data: it is required"):
        ranges("")
    with pytest.raises(ConfigError, match=r"nowhere\.idx: there is no such file"):
        ranges(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nowhere\.idx: there is no such file"):
        ranges(short, valid_data=str(tmp_path / "nowhere"))


def test_sources_of_equal_size_are_read_in_different_orders(tmp_path: Path) -> None:
    prefixes = [write_counting(tmp_path / name, [100] * 10) for name in ("a", "b")]
    blend = open_datasets(parse_data_spec(prefixes, split="1"), seq_length=8, seed=7)["train"]
    first, second = (data.samples(range(20)).tolist() for data in blend.datasets)
    alone = open_datasets(parse_data_spec(prefixes[0], split="1"), seq_length=8, seed=7)["train"]
    assert first == alone.samples(range(20)).tolist()
    assert sum(left == right for left, right in zip(first, second, strict=True)) < 5
