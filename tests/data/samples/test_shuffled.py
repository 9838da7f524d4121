"""The default order: a keyed permutation of windows, a pure function of (tokens, seed, index)."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.data.samples.shuffled import MASK_64, ShuffledWindows, mix, permute
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from tests.data.counting import write_counting


def scalar_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def scalar_permute(index: int, size: int, key: int) -> int:
    """Permute one index. The order of every existing run depends on these numbers."""
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(8):
            left, right = right, left ^ (scalar_mix(key ^ scalar_mix(right * 8 + number)) & mask)
        index = left << half | right
        if index < size:
            return index


def scalar_start(data: ShuffledWindows, index: int) -> int:
    epoch, position = divmod(index, data.samples_per_epoch)
    key = scalar_mix(scalar_mix(data.seed & MASK_64) ^ epoch)
    spare = data.num_tokens - 1 - data.samples_per_epoch * data.seq_length
    shift = scalar_mix(key) % (spare + 1)
    return data.first_token + shift + scalar_permute(position, data.samples_per_epoch, key) * data.seq_length


def images(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    return permute(indices, size, np.full(len(indices), key, np.uint64))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 65, 4097, 10**6, 2**31 + 7, 10**15 + 37, 2**62 - 1])
def test_equals_the_scalar_reference(size: int) -> None:
    rng = np.random.default_rng(size)
    indices, keys = rng.integers(0, size, 50), rng.integers(0, 2**64, 50, np.uint64)
    expected = [scalar_permute(*arguments) for arguments in
                zip(indices.tolist(), [size] * 50, keys.tolist(), strict=True)]
    assert permute(indices, size, keys).tolist() == expected
    assert mix(keys).tolist() == [scalar_mix(key) for key in keys.tolist()]


def test_golden_values() -> None:
    assert images(np.arange(10), 10, 12345).tolist() == [0, 1, 7, 2, 8, 5, 6, 3, 9, 4]


def test_looks_random() -> None:
    """Over many keys, each index gets each position about equally often. Positions of neighbours are uncorrelated."""
    size, keys = 5, 4000
    for index in range(size):
        places = permute(np.full(keys, index), size, np.arange(keys, dtype=np.uint64) * np.uint64(7919))
        assert np.abs(np.bincount(places, minlength=size) / keys - 1 / size).max() < 0.03
    order = images(np.arange(10_000), 10_000, 42)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("seed", [0, -1, 2**70 + 5])
def test_sample_starts_are_the_same_however_they_are_read(tmp_path: Path, seed: int) -> None:
    """A sequential reader gets starts that were computed ahead. Steps, gaps and jumps do not change them."""
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        writer.add_document(np.zeros(70_000, np.uint16))
        writer.finalize()
    indexed = IndexedDataset(tmp_path / "data")

    def data() -> ShuffledWindows:
        return ShuffledWindows(indexed, seq_length=13, seed=seed, first_token=5)

    for width, gap, first in ((1, 300, 0), (7, 0, 0), (7, 9, 4000), (5000, 0, 0), (64, 64, 3), (3, 1000, 2**40)):
        reader = data()
        for low in range(first, first + 12_000, width + gap):
            starts = reader.sample_starts(np.arange(low, low + width))
            checked = low + (low // 7) % width
            assert starts[checked - low] == scalar_start(reader, checked), (width, gap, checked)
    jumping = data()
    for row in np.random.default_rng(3).integers(0, 20_000, (100, 2)).tolist():
        near = [*row, row[0] + 1, row[0]]
        assert jumping.sample_starts(np.array(near)).tolist() == [scalar_start(jumping, index) for index in near]


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
