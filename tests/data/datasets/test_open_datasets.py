"""Training, validation and test data of a run: parts of the same documents, or token files of their own."""

from pathlib import Path

import pytest

from pretrain.data.data_spec import parse_data_spec, parse_split, split_documents
from pretrain.data.open_datasets import open_datasets
from pretrain.data.run_data import open_run_data
from pretrain.errors import ConfigError
from tests.data.counting import write_counting


def write_data(prefix: Path, lengths: list[int]) -> str:
    return str(write_counting(prefix, lengths).prefix)


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
    prefix = write_data(tmp_path / "data", [100] * 10)
    assert ranges(prefix, split="8,1,1") == {"train": (0, 800), "valid": (800, 900), "test": (900, 1000)}
    assert ranges(prefix, split="9,1") == {"train": (0, 900), "valid": (900, 1000)}
    assert ranges(prefix, split="1") == {"train": (0, 1000)}


def test_separate_validation_data_leaves_all_documents_to_training(tmp_path: Path) -> None:
    prefix, valid = write_data(tmp_path / "data", [100] * 10), write_data(tmp_path / "valid", [50])
    own = ranges(prefix, valid_data=valid, split="9,5,1")
    assert own == {"train": (0, 900), "valid": (0, 50), "test": (900, 1000)}
    assert ranges(prefix, valid_data=valid) == {"train": (0, 1000), "valid": (0, 50)}
    both = ranges(prefix, valid_data=valid, test_data=valid, split="8,1,1")
    assert both == {"train": (0, 1000), "valid": (0, 50), "test": (0, 50)}


def test_missing_and_short_datasets_are_rejected(tmp_path: Path) -> None:
    short = write_data(tmp_path / "short", [100, 100, 5])
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
    prefixes = [write_data(tmp_path / name, [100] * 10) for name in ("a", "b")]
    blend = open_datasets(parse_data_spec(prefixes, split="1"), seq_length=8, seed=7)["train"]
    first, second = (data.samples(range(20)).tolist() for data in blend.datasets)
    alone = open_datasets(parse_data_spec(prefixes[0], split="1"), seq_length=8, seed=7)["train"]
    assert first == alone.samples(range(20)).tolist()
    assert sum(left == right for left, right in zip(first, second, strict=True)) < 5


def test_a_source_that_is_too_small_for_validation_is_left_out_with_a_note(tmp_path: Path) -> None:
    large, small = write_data(tmp_path / "large", [100] * 10), write_data(tmp_path / "small", [30, 5])
    spec = parse_data_spec([large, small], split="1,1")
    data = open_run_data(spec, seq_length=8, seed=7, tokenizer=None, vocab_size=1000)
    assert [str(source.prefix) for source in data.datasets["train"].sources] == [large, small]
    assert [str(source.prefix) for source in data.datasets["valid"].sources] == [large]
    assert data.notes == (f"the validation data has no samples of {small}: their part by --split is shorter than a "
                          "sample",)
