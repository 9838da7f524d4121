"""The default order: each epoch visits each window once, in an order of its own."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError
from tests.data.counting import write_counting


@pytest.fixture
def counting(tmp_path: Path) -> IndexedDataset:
    return write_counting(tmp_path / "data", [100] * 10)


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

    same = write_counting(tmp_path / "same", [100] * 10)
    other = write_counting(tmp_path / "other", [100] * 10, first=1)
    assert of(counting) == of(same) == of(counting, seed=2)
    different = [of(counting), of(other), of(counting, seq_length=9), of(counting, last_token=999)]
    assert len(set(different)) == 4
