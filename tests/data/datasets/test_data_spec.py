"""Values of --train_data, --valid_data, --test_data and --blend_schedule."""

import os

import pytest

from pretrain.data.data_spec import (
    BlendPhase,
    DataSpec,
    absolute_words,
    parse_data_spec,
    planned_samples,
    recorded_data_spec,
)
from pretrain.errors import ConfigError


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
    ({"train_data": "a", "sample_order": "megatorn"}, 'Did you mean "megatron"'),
    ({"train_data": ["a", "b"], "sample_order": "neox"}, "--sample_order neox: --train_data has 2 prefixes"),
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


def test_samples_are_counted_as_in_megatron() -> None:
    assert planned_samples(train_steps=10, eval_interval=4, eval_steps=2, global_batch_size=8) == {
        "train": 80, "valid": 3 * 16, "test": 16}
    moved = {"train_steps": 10, "eval_interval": 0, "eval_steps": 2, "global_batch_size": 8, "first_sample": 24}
    assert planned_samples(**moved)["train"] == 104
    assert planned_samples(**moved, order_samples=1000)["train"] == 1000
