"""Schedules from the --lr_* flags: defaults, lengths in tokens, and validation."""

import itertools
import re

import pytest

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.check_flags import check_flags
from pretrain.config.schedules.length import RunLength, run_length
from pretrain.config.schedules.make import make_schedule
from pretrain.config.schedules.scaling import rate_factor
from pretrain.config.schedules.schedule import Schedule
from pretrain.data.token_schedules import BatchSizes, fixed_batch
from pretrain.errors import ConfigError

TOKENS = 8  # in a sample
RAMP = BatchSizes(((0, 2), (20, 4), (61, 8)))  # positions: 0 2 ... 20 (10 steps), 24 ... 64 (11 steps), 72 80 ...


def schedule(train_steps: int, *, batch_sizes: BatchSizes | None = None, peak: float = 0.5, **flags: object
             ) -> Schedule:
    length = RunLength(train_steps, batch_sizes or fixed_batch(4), seq_length=TOKENS)
    arguments = RunArguments(train_steps=train_steps, **flags)
    check_flags(arguments)
    return make_schedule(arguments, peak=peak, length=length)


def test_defaults_are_fractions_of_the_run() -> None:
    assert schedule(1000) == Schedule("cosine", 0.5, 0.1, 10, 1000, 0)
    assert schedule(1000, lr_schedule="wsd") == Schedule("wsd", 0.5, 0.1, 10, 1000, 200)
    assert schedule(1, lr_schedule="wsd") == Schedule("wsd", 0.5, 0.1, 1, 1, 0)
    assert schedule(1000, lr_schedule="inverse_sqrt") == Schedule("inverse_sqrt", 0.5, 0.0, 10, 1000, 0)
    assert schedule(1000, lr_schedule="one_cycle") == Schedule("one_cycle", 0.5, pytest.approx(4e-6), 300, 1000, 0,
                                                               initial_ratio=0.04)
    assert schedule(1000, lr_schedule="step", lr_milestones="8e2,900") == Schedule(
        "step", 0.5, 0.0, 10, 1000, 0, milestones=(800, 900), milestone_factor=0.1)


def test_the_lowest_rate_is_a_fraction_or_a_rate() -> None:
    assert schedule(100, min_lr=0.05) == schedule(100, min_lr_ratio=0.1)
    with pytest.raises(ConfigError, match=r"--min_lr: found 0\.6; expected at most the peak rate, 0\.5"):
        schedule(100, min_lr=0.6)


def test_tokens_are_rounded_up_to_complete_steps() -> None:
    """A step has 4 samples of 8 tokens."""
    got = schedule(100, lr_schedule="wsd", lr_warmup_tokens=65, lr_decay_tokens=1600, lr_wsd_tokens=320)
    assert got == schedule(100, lr_schedule="wsd", lr_warmup_steps=3, lr_decay_steps=50, lr_wsd_steps=10)
    assert schedule(100, lr_warmup_tokens=0).warmup_steps == 0
    stepped = schedule(100, lr_schedule="step", lr_milestone_tokens="1e3,1600", lr_milestone_factor=0.5)
    assert stepped.milestones == (32, 50)
    assert stepped.milestone_factor == 0.5


def positions(batch_sizes: BatchSizes, steps: int, first_sample: int = 0) -> list[int]:
    """Return the data position after each step, found by walking."""
    got = [first_sample]
    for _ in range(steps):
        got.append(got[-1] + [size for first, size in batch_sizes.stages if first <= got[-1]][-1])
    return got


@pytest.mark.parametrize("first_sample", [0, 1, 20, 21, 63, 64, 500])
def test_steps_and_tokens_of_a_ramp_equal_those_of_a_walk(first_sample: int) -> None:
    walked = positions(RAMP, 40, first_sample)
    length = RunLength(40, RAMP, seq_length=TOKENS, first_sample=first_sample)
    assert [RAMP.samples_after(steps, first_sample=first_sample) for steps in range(41)] == walked
    assert [RAMP.at(position) for position in walked[:-1]] == [b - a for a, b in itertools.pairwise(walked)]
    assert length.samples == walked[-1] - first_sample
    for tokens in range(0, (walked[-1] - first_sample) * TOKENS + 1, 5):
        steps = length.steps_of(tokens)
        assert length.tokens_after(steps) >= tokens
        assert steps == 0 or length.tokens_after(steps - 1) < tokens


@pytest.mark.parametrize("first_sample", [0, 7, 20, 61, 100])
def test_the_batch_of_each_step_is_found_from_its_end(first_sample: int) -> None:
    walked = positions(RAMP, 40, first_sample)
    assert [RAMP.ending_at(end) for end in walked[1:]] == [b - a for a, b in itertools.pairwise(walked)]
    length = RunLength(40, RAMP, seq_length=TOKENS)
    assert [length.samples_between(step, 40, position=walked[step]) for step in (0, 9, 39, 40)] == \
        [walked[40] - walked[step] for step in (0, 9, 39, 40)]


def test_tokens_of_the_schedule_follow_the_ramp() -> None:
    got = schedule(40, batch_sizes=RAMP, lr_schedule="wsd", lr_warmup_tokens=24 * TOKENS,
                   lr_decay_tokens=80 * TOKENS, lr_wsd_tokens=24 * TOKENS)
    assert (got.warmup_steps, got.decay_steps, got.wsd_steps) == (11, 23, 4)  # at samples 24, 80 and from 60 on
    assert run_length(None, 80 * TOKENS, batch_sizes=RAMP, seq_length=TOKENS).train_steps == 23
    assert run_length(None, 80 * TOKENS + 1, batch_sizes=RAMP, seq_length=TOKENS).train_steps == 24
    assert run_length(7, None, batch_sizes=RAMP, seq_length=TOKENS).train_steps == 7


def test_scaling_of_the_peak_rate() -> None:
    assert rate_factor("linear", batch=1024, reference_batch=256) == 4
    assert rate_factor("sqrt", batch=1024, reference_batch=256) == 2
    assert rate_factor("sqrt", batch=64, reference_batch=256) == 0.5
    assert rate_factor(None, batch=64, reference_batch=None) == 1


WSD, STEP = {"lr_schedule": "wsd"}, {"lr_schedule": "step"}


@pytest.mark.parametrize(("flags", "message"), [
    ({"lr_schedule": "cosin"}, 'Did you mean "cosine"'),
    ({"lr_wsd_steps": 5}, "--lr_wsd_steps: found 5 with --lr_schedule cosine; expected no value"),
    ({"lr_wsd_tokens": 5}, "--lr_wsd_tokens: found 5 with"),
    ({"lr_decay_shape": "sqrt"}, "It has an effect on wsd only"),
    ({**WSD, "lr_decay_shape": "1-sqr"}, 'Did you mean "1-sqrt"'),
    ({"lr_schedule": "constant", "lr_decay_steps": 40}, "--lr_decay_steps: found 40 with --lr_schedule constant"),
    ({"lr_schedule": "constant", "min_lr_ratio": 0.1}, "--min_lr_ratio: found 0.1 with --lr_schedule constant"),
    ({"lr_schedule": "inverse_sqrt", "lr_decay_tokens": 40}, "--lr_decay_tokens"),
    ({"lr_schedule": "inverse_sqrt", "lr_warmup_steps": 0}, "--lr_warmup_steps: found 0; expected at least 1"),
    ({"min_lr_ratio": 1.5}, "--min_lr_ratio: found 1.5; expected at most 1"),
    ({"min_lr_ratio": 0.1, "min_lr": 1e-5}, "--min_lr_ratio / --min_lr: found both; expected one of the two"),
    ({"lr_warmup_steps": 1, "lr_warmup_tokens": 1}, "--lr_warmup_steps / --lr_warmup_tokens: found both"),
    ({"lr_warmup_steps": 101}, "--lr_warmup_steps: found 101; expected at least 0 and at most 100 (the run)"),
    ({"lr_warmup_tokens": 100 * 32 + 1}, "--lr_warmup_tokens: found 101"),
    ({"lr_warmup_steps": 50, "lr_decay_steps": 40}, "--lr_decay_steps: found 40; expected at least 50 steps"),
    ({**WSD, "lr_wsd_steps": 100}, "--lr_wsd_steps: found 100; expected at least 0 and at most 99"),
    ({**WSD, "lr_wsd_tokens": 10**6}, "--lr_wsd_tokens: found 100"),
    (STEP, "--lr_milestones: the flag is missing"),
    ({**STEP, "lr_milestones": "30,20"}, "--lr_milestones: found 30,20; expected numbers that rise"),
    ({**STEP, "lr_milestones": "30,x"}, "--lr_milestones: found 30,x"),
    ({**STEP, "lr_milestones": ""}, "--lr_milestones: found"),
    ({**STEP, "lr_milestones": "3", "lr_warmup_steps": 4}, "--lr_milestones: found step 3; expected after the 4"),
    ({**STEP, "lr_milestone_tokens": "3001,3002"}, "expected milestones in different steps"),
    ({**STEP, "lr_milestones": "30", "lr_milestone_factor": 0.0}, "--lr_milestone_factor: found 0.0"),
    ({"lr_milestones": "30"}, "It has an effect on step only"),
    ({"lr_reference_batch": 4}, "--lr_reference_batch: it has no effect without --lr_scaling"),
    ({"lr_scaling": "sqrt"}, "--lr_scaling: it has no effect without --lr_reference_batch"),
    ({"lr_scaling": "cube", "lr_reference_batch": 4}, "--lr_scaling: found cube"),
    ({"train_tokens": 5}, "--train_steps / --train_tokens: found both"),
])
def test_flags_are_validated(flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        schedule(100, **flags)
