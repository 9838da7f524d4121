"""pretrain/config/schedule.py: the rate of each step, and what its flags may say."""

import dataclasses
import itertools
import math

import pytest

from pretrain.config.arguments import RunArguments
from pretrain.config.schedule import Schedule, learning_rate, make_schedule, run_steps
from pretrain.errors import ConfigError

ARGS = RunArguments(train_steps=100, seq_length=10)


def rates(kind: str, **changes: float) -> list[float]:
    settings = {"peak": 1.0, "min_ratio": 0.1, "kind": kind, "warmup_steps": 4, "decay_steps": 20, "wsd_steps": 5}
    return [learning_rate(step, **{**settings, **changes}) for step in range(30)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_starts_above_zero_and_reaches_the_peak(kind: str) -> None:
    assert rates(kind)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert max(rates(kind)) == 1.0


def test_cosine_is_half_way_in_the_middle_and_lowest_from_the_last_step_on() -> None:
    got = rates("cosine")
    assert got[11] == pytest.approx((1 + 0.1) / 2)
    assert got[5] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 2 / 16)))
    assert got[18] > 0.1
    assert got[19:] == pytest.approx([0.1] * 11)


def test_linear_falls_by_equal_amounts() -> None:
    got = rates("linear")
    assert [a - b for a, b in itertools.pairwise(got[3:20])] == pytest.approx([0.9 / 16] * 16)
    assert got[19:] == pytest.approx([0.1] * 11)


def test_constant_stays_and_wsd_decays_at_the_end() -> None:
    assert rates("constant")[3:] == [1.0] * 27
    assert rates("wsd")[3:15] == [1.0] * 12
    assert rates("wsd")[15:20] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])


def test_no_warm_up_starts_near_the_peak() -> None:
    assert rates("linear", warmup_steps=0)[0] == pytest.approx(1 - 0.9 / 20)


def test_defaults_are_shares_of_the_run() -> None:
    assert make_schedule(ARGS, train_steps=1000, peak_lr=0.5) == Schedule("cosine", 0.5, 0.1, 10, 1000, 0)
    wsd = dataclasses.replace(ARGS, lr_schedule="wsd")
    assert make_schedule(wsd, train_steps=1000, peak_lr=0.5) == Schedule("wsd", 0.5, 0.1, 10, 1000, 200)
    assert make_schedule(wsd, train_steps=1, peak_lr=0.5) == Schedule("wsd", 0.5, 0.1, 1, 1, 0)
    assert make_schedule(ARGS, train_steps=1000, peak_lr=None) is None


@pytest.mark.parametrize(("changes", "culprit"), [
    ({"lr_schedule": "cosin"}, 'did you mean "cosine"'),
    ({"lr_warmup_steps": 101}, "--lr_warmup_steps"),
    ({"lr_warmup_steps": 50, "lr_decay_steps": 40}, "--lr_decay_steps"),
    ({"lr_wsd_steps": 5}, "--lr_wsd_steps"),
    ({"lr_schedule": "wsd", "lr_wsd_steps": 100}, "--lr_wsd_steps"),
    ({"lr_schedule": "constant", "lr_decay_steps": 40}, "--lr_decay_steps"),
    ({"min_lr_ratio": 1.5}, "--min_lr_ratio"),
])
def test_flags_that_contradict_each_other_are_refused(changes: dict, culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        make_schedule(dataclasses.replace(ARGS, **changes), train_steps=100, peak_lr=1.0)


def test_tokens_are_rounded_up_to_whole_steps() -> None:
    assert run_steps(ARGS, 4) == 100
    tokens = dataclasses.replace(ARGS, train_steps=None, train_tokens=81)
    assert run_steps(tokens, 4) == 3
    assert run_steps(dataclasses.replace(tokens, train_tokens=80), 4) == 2
    with pytest.raises(ConfigError, match="both"):
        run_steps(dataclasses.replace(ARGS, train_tokens=5), 4)
