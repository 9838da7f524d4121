"""The flags of the data, and the datasets that are opened for them."""

import os
from pathlib import Path

import pytest

from pretrain.data.data_spec import (
    BlendPhase,
    DataSpec,
    absolute_words,
    parse_data_spec,
    parse_split,
    planned_samples,
    recorded_data_spec,
    split_documents,
)
from pretrain.data.open_datasets import open_datasets
from pretrain.data.run_data import open_run_data
from pretrain.errors import ConfigError
from tests.data.counting import write_counting


@pytest.mark.parametrize(("words", "prefixes", "weights"), [
    ("a", ("a",), None),  # run.json of earlier runs
    (["a"], ("a",), None),
    (["7"], ("7",), None),
    (["a b"], ("a b",), None),
    (["2", "a"], ("a",), None),
    (["a", "b/a"], ("a", "b/a"), None),
    (["0.3", "a", "7e-1", "b"], ("a", "b"), (0.3, 0.7)),
    (["1", "./5", "1", "6/"], ("./5", "6/"), (1, 1)),
    (None, (), None),
])
def test_blends(words: str | list[str] | None, prefixes: tuple[str, ...], weights: tuple[float, ...] | None) -> None:
    assert parse_data_spec(words) == DataSpec(train=prefixes, weights=weights)


@pytest.mark.parametrize(("flags", "message"), [
    ({"train_data": ["1", "a", "2"]}, "--train_data 1 a 2: 3 words are not pairs"),
    ({"train_data": ["1", "a", "b", "2"]}, "found weight b"),
    ({"train_data": ["a", "1", "b", "2"]}, "found 1; expected a prefix. Each weight comes before its prefix"),
    ({"train_data": ["0", "a", "1", "b"]}, "found weight 0; expected a number above 0"),
    ({"train_data": ["-1", "a", "1", "b"]}, "found weight -1"),
    ({"train_data": ["nan", "a", "1", "b"]}, "found weight nan"),
    ({"train_data": ["1", "a", "inf", "b"]}, "found weight inf"),
    ({"train_data": ["1", "a", "2", "./a"]}, "./a is named twice"),
    ({"train_data": "0.5 a 0.5 b"}, r"in YAML write a list: \[0.5, a, 0.5, b\]"),
    ({"train_data": "~/a"}, "was not expanded"),
    ({"train_data": ["a", ""]}, "the value is empty"),
    ({"train_data": "a", "valid_data": ["b", "b"]}, "--valid_data: b is named twice"),
    ({"train_data": "a", "valid_data": ["x/b", "y/b"]}, "two sets have the name b. Name each of them: NAME=x/b"),
    ({"train_data": "a", "test_data": ["n=b", "n=c"]}, "--test_data: two sets have the name n"),
    ({"train_data": "a", "split": "9,x"}, "--split"),
    ({"train_data": "a", "sample_order": "shufled"}, 'Did you mean "shuffled"'),
    ({"train_data": "a", "blend_schedule": "0:1"}, "there is nothing to blend"),
    ({"train_data": ["a", "b"], "blend_schedule": "0.5:1,1"}, "found 0.5:1,1; expected FROM_TOKENS"),
    ({"train_data": ["a", "b"], "blend_schedule": "1,1"}, "found 1,1; expected FROM_TOKENS"),
    ({"train_data": ["a", "b"], "blend_schedule": "0:1,1,1"}, "found 3 weights in 0:1,1,1; expected 2"),
    ({"train_data": ["a", "b"], "blend_schedule": ["9:1", "1"]}, "expected 2, one for each prefix of --train_data. "
     "In a YAML list, write each phase in quotes"),
    ({"train_data": ["a", "b"], "blend_schedule": "0:0,0"}, "at least one weight above 0"),
    ({"train_data": ["a", "b"], "blend_schedule": "0:1,-1"}, "found weight -1"),
    ({"train_data": ["a", "b"], "blend_schedule": ["5:1,1", "5:1,2"]}, "found 5 after 5; expected ascending"),
    ({"train_data": ["1", "a", "1", "b"], "blend_schedule": "0:1,2"}, "--train_data has weights too"),
])
def test_wrong_values_are_rejected(flags: dict[str, str | list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_data_spec(**flags)  # type: ignore[arg-type]


def test_evaluation_sets_have_names() -> None:
    def names(*words: str) -> tuple[tuple[str, str], ...]:
        return parse_data_spec("a", valid_data=words).valid

    assert names("x/b") == (("valid", "x/b"),)
    assert names("web=x/b") == (("valid/web", "x/b"),)
    assert names("web=x/b", "y/code") == (("valid/web", "x/b"), ("valid/code", "y/code"))
    assert names("/data/lr=1/b") == (("valid", "/data/lr=1/b"),), "a path may contain ="


def test_the_schedule_of_a_blend() -> None:
    spec = parse_data_spec(["a", "b"], blend_schedule=["0:0.9,0.1", "1e9:0,1"])
    assert spec.blend_schedule == (BlendPhase(0, (0.9, 0.1)), BlendPhase(10**9, (0, 1)))


def test_recorded_values_have_absolute_paths_and_mean_the_same() -> None:
    here = os.getcwd()
    assert absolute_words("a") == absolute_words(["a"]) == f"{here}/a", "as earlier versions record it"
    assert absolute_words(None) is None
    assert absolute_words(["1", "a", "2", "./5"]) == ["1", f"{here}/a", "2", f"{here}/5"]
    assert absolute_words(["n=a", "/b=c"]) == [f"n={here}/a", "/b=c"]
    flags = {"train_data": absolute_words(["1", "a", "2", "b"]), "valid_data": absolute_words(["n=c"]), "split": "1",
             "blend_schedule": ["5:1,1"], "sample_order": "shuffled"}
    assert recorded_data_spec(flags) == DataSpec(
        (f"{here}/a", f"{here}/b"), (1, 2), (("valid/n", f"{here}/c"),), split="1",
        blend_schedule=(BlendPhase(5, (1, 1)),))


def test_a_record_makes_no_program_connect_to_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"train_data": ["s3://bucket/a/x", "s3://bucket/b/y"]}
    with pytest.raises(ConfigError, match=r"the run's data is at s3://bucket/a/x; .*DS_PRETRAIN_CONNECT_TO=s3://bucket/a"):
        recorded_data_spec(flags)
    for others in ("s3://buck", "s3://bucket/a", "https://s3://bucket/"):
        monkeypatch.setenv("DS_PRETRAIN_CONNECT_TO", others)
        with pytest.raises(ConfigError, match="the run's data is at s3://bucket/"):
            recorded_data_spec(flags)
    for allowed in ("s3://bucket", "s3://bucket/", "s3://bucket/a s3://bucket/b/"):
        monkeypatch.setenv("DS_PRETRAIN_CONNECT_TO", allowed)
        spec = recorded_data_spec(flags)
        assert (spec.train, spec.settings) == (("s3://bucket/a/x", "s3://bucket/b/y"), {})


def test_samples_are_counted_as_in_megatron() -> None:
    assert planned_samples(train_steps=10, eval_interval=4, eval_steps=2, global_batch_size=8) == {
        "train": 80, "valid": 3 * 16, "test": 16}
    moved = {"train_steps": 10, "eval_interval": 0, "eval_steps": 2, "global_batch_size": 8, "first_sample": 24}
    assert planned_samples(**moved)["train"] == 104
    assert planned_samples(**moved, order_samples=1000)["train"] == 1000


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
