"""Learning rate of each step, and validation of the --lr_* flags."""

import itertools
import math

import pytest

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.check_flags import check_flags
from pretrain.config.lr_schedule import Schedule, learning_rate, make_schedule, run_steps
from pretrain.errors import ConfigError


def rates(kind: str, **changes: float) -> list[float]:
    values = {"peak": 1.0, "min_ratio": 0.1, "kind": kind, "warmup_steps": 4, "decay_steps": 20, "wsd_steps": 5}
    return [learning_rate(step, **{**values, **changes}) for step in range(30)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_starts_above_zero_and_reaches_the_peak(kind: str) -> None:
    assert rates(kind)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert max(rates(kind)) == 1.0


def test_cosine_has_the_mean_rate_in_the_middle_and_the_lowest_at_the_end() -> None:
    got = rates("cosine")
    assert got[11] == pytest.approx((1 + 0.1) / 2)
    assert got[5] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 2 / 16)))
    assert got[18] > 0.1
    assert got[19:] == pytest.approx([0.1] * 11)


def test_linear_decreases_by_equal_amounts() -> None:
    got = rates("linear")
    assert [a - b for a, b in itertools.pairwise(got[3:20])] == pytest.approx([0.9 / 16] * 16)
    assert got[19:] == pytest.approx([0.1] * 11)


def test_constant_keeps_the_peak_and_wsd_decays_at_the_end() -> None:
    assert rates("constant")[3:] == [1.0] * 27
    assert rates("wsd")[3:15] == [1.0] * 12
    assert rates("wsd")[15:20] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])


def test_a_run_without_warm_up_starts_near_the_peak() -> None:
    assert rates("linear", warmup_steps=0)[0] == pytest.approx(1 - 0.9 / 20)


def test_defaults_are_fractions_of_the_run() -> None:
    def schedule(kind: str, train_steps: int) -> Schedule:
        return make_schedule(kind, peak=0.5, min_ratio=0.1, train_steps=train_steps)

    assert schedule("cosine", 1000) == Schedule("cosine", 0.5, 0.1, 10, 1000, 0)
    assert schedule("wsd", 1000) == Schedule("wsd", 0.5, 0.1, 10, 1000, 200)
    assert schedule("wsd", 1) == Schedule("wsd", 0.5, 0.1, 1, 1, 0)


@pytest.mark.parametrize(("flags", "culprit"), [
    ({"lr_schedule": "cosin"}, 'Did you mean "cosine"'),
    ({"lr_wsd_steps": 5}, "--lr_wsd_steps"),
    ({"lr_schedule": "constant", "lr_decay_steps": 40}, "--lr_decay_steps"),
    ({"min_lr_ratio": 1.5}, "--min_lr_ratio"),
])
def test_schedule_flags_are_validated(flags: dict, culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        check_flags(RunArguments(train_steps=100, **flags))


@pytest.mark.parametrize(("kind", "steps", "culprit"), [
    ("cosine", {"warmup_steps": 101}, "--lr_warmup_steps"),
    ("cosine", {"warmup_steps": 50, "decay_steps": 40}, "--lr_decay_steps"),
    ("wsd", {"wsd_steps": 100}, "--lr_wsd_steps"),
])
def test_phases_of_the_schedule_must_follow_one_another(kind: str, steps: dict, culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        make_schedule(kind, peak=1.0, min_ratio=0.1, train_steps=100, **steps)


def test_tokens_are_rounded_up_to_complete_steps() -> None:
    assert run_steps(100, None, tokens_per_step=40) == 100
    assert run_steps(None, 81, tokens_per_step=40) == 3
    assert run_steps(None, 80, tokens_per_step=40) == 2
    with pytest.raises(ConfigError, match="both"):
        check_flags(RunArguments(train_steps=100, train_tokens=5))
