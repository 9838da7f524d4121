"""The default order: a keyed permutation of windows, a pure function of (tokens, seed, index)."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.data.samples.shuffled import ShuffledWindows, permute
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from tests.data.counting import write_counting

GOLDEN_IMAGES = {  # size -> images of 0, the middle and the last index; the order of every run depends on them
    1: [0, 0, 0], 5: [0, 3, 4], 65: [39, 57, 9], 10**15 + 37: [240442384173591, 265235223424765, 863209085455471],
    2**62 - 1: [4306811414826336628, 740412563375389116, 329848248620964731]}
GOLDEN_STARTS = {  # seed -> first tokens of the samples 0, 1, 2, 5382 and 5383 (next epoch), 10^6 and 2^40
    0: [59585, 6519, 42191, 63251, 6375, 50578, 9809], -1: [31072, 29863, 36506, 46867, 40206, 47079, 17073],
    2**70 + 5: [57340, 40817, 52699, 62124, 31153, 56611, 28791]}


def images(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    return permute(indices, size, np.full(len(indices), key, np.uint64))


@pytest.mark.parametrize("size", GOLDEN_IMAGES)
def test_golden_values(size: int) -> None:
    assert images(np.array([0, size // 2, size - 1]), size, 12345).tolist() == GOLDEN_IMAGES[size]


def test_looks_random() -> None:
    """Over many keys, each index gets each position about equally often. Positions of neighbours are uncorrelated."""
    size, keys = 5, 4000
    for index in range(size):
        places = permute(np.full(keys, index), size, np.arange(keys, dtype=np.uint64) * np.uint64(7919))
        assert np.abs(np.bincount(places, minlength=size) / keys - 1 / size).max() < 0.03
    order = images(np.arange(10_000), 10_000, 42)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("seed", GOLDEN_STARTS)
def test_sample_starts_are_the_same_however_they_are_read(tmp_path: Path, seed: int) -> None:
    """A sequential reader gets starts that were computed ahead. Steps, gaps and jumps do not change them."""
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add_document(np.zeros(70_000, np.uint16))
        writer.finalize()
    indexed = IndexedDataset(tmp_path / "data")
    jumping = ShuffledWindows(indexed, seq_length=13, seed=seed, first_token=5)
    assert jumping.sample_starts(np.array([0, 1, 2, 5382, 5383, 10**6, 2**40])).tolist() == GOLDEN_STARTS[seed]
    for width, gap, first in ((1, 300, 0), (7, 0, 0), (7, 9, 4000), (5000, 0, 0), (64, 64, 3), (3, 1000, 2**40)):
        reader = ShuffledWindows(indexed, seq_length=13, seed=seed, first_token=5)
        for low in range(first, first + 9_000, width + gap):
            starts = reader.sample_starts(np.arange(low, low + width))
            checked = np.array([low + (low // 7) % width, 0])  # a jump, which is never computed ahead
            assert starts[checked[0] - low] == jumping.sample_starts(checked)[0], (width, gap, checked)


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
