"""Schedules: closed forms, transformers' and torch's schedulers, the JSON round trip, and the --lr_* flags."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR, StepLR
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.check_flags import check_flags
from pretrain.config.make_schedule import make_schedule
from pretrain.config.plan import RunLength, run_length
from pretrain.config.schedule import DECAY_SHAPES, KINDS, Schedule, rate_factor, schedule_from_json
from pretrain.data.token_schedules import BatchSizes, fixed_batch
from pretrain.errors import ConfigError

PEAK, WARMUP, DECAY, WSD, LOWEST, RUN = 3e-4, 7, 60, 20, 2.4e-5, 80
EXACT = {"rel": 1e-12, "abs": 0}


def schedule(kind: str, **changes: object) -> Schedule:
    values: dict = {"kind": kind, "peak": PEAK, "min_ratio": LOWEST / PEAK, "warmup_steps": WARMUP,
                    "decay_steps": DECAY, "wsd_steps": WSD if kind == "wsd" else 0}
    return Schedule(**{**values, **changes})


def rates(schedule: Schedule) -> list[float]:
    return [schedule(step) for step in range(RUN)]


def linear(n: int) -> float:
    return max(PEAK - (PEAK - LOWEST) * (n - WARMUP) / (DECAY - WARMUP), LOWEST)


def wsd(shape: str) -> Callable[[int], float]:
    def rate(n: int) -> float:
        done = min(max(n - (DECAY - WSD), 0), WSD) / WSD
        left = {"linear": 1 - done, "sqrt": (1 - done) ** 0.5, "1-sqrt": 1 - done**0.5,
                "cosine": math.cos(math.pi / 2 * done) ** 2}[shape]
        return left * PEAK + (1 - left) * LOWEST
    return rate


def steps(n: int) -> float:
    return max(PEAK * (1 if n <= 30 else 0.25 if n <= 45 else 0.0625), LOWEST)


# what transformers and torch do not have; their schedules are compared below
CLOSED_FORMS: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "linear": (schedule("linear"), linear),
    "inverse_sqrt": (schedule("inverse_sqrt", min_ratio=0.5), lambda n: max(PEAK * WARMUP**0.5 * n**-0.5, PEAK / 2)),
    "step": (schedule("step", milestones=(30, 45), milestone_factor=0.25), steps),
    **{f"wsd {shape}": (schedule("wsd", decay_shape=shape), wsd(shape)) for shape in DECAY_SHAPES},
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_schedules_equal_their_closed_form(name: str) -> None:
    got, after_warm_up = CLOSED_FORMS[name]
    expected = [PEAK * n / WARMUP if n < WARMUP else after_warm_up(n) for n in range(1, RUN + 1)]
    assert rates(got) == pytest.approx(expected, **EXACT)
    assert rates(got)[0] == PEAK / WARMUP  # near zero, but never zero


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_without_warm_up_and_of_one_step(kind: str) -> None:
    for warmup_steps in (0, 1):
        one = schedule(kind, warmup_steps=warmup_steps, decay_steps=1, wsd_steps=0, initial_ratio=0.04)
        assert all(LOWEST <= one(step) <= PEAK * (1 + 1e-15) for step in range(3)), kind
    assert schedule(kind, warmup_steps=1)(0) == PEAK


def rates_of(make: Callable[[torch.optim.Optimizer], LRScheduler], count: int, *, lr: float = PEAK) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, got = make(optimizer), []
    for _ in range(count):
        got.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return got


# transformers computes the rate of the first step for 0 updates, so its first step has rate 0 and its peak comes one
# step later. The rate of our step number n is its rate after n updates. The warm-up of its wsd begins at the lowest
# rate instead of 0.
TRANSFORMERS: dict[str, tuple[Schedule, Callable[[torch.optim.Optimizer], LRScheduler]]] = {
    "cosine": (schedule("cosine"), lambda optimizer: get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, WARMUP, DECAY, min_lr=LOWEST)),
    "linear": (schedule("linear", min_ratio=0.0),
               lambda optimizer: get_linear_schedule_with_warmup(optimizer, WARMUP, DECAY)),
    "constant": (schedule("constant"), lambda optimizer: get_constant_schedule_with_warmup(optimizer, WARMUP)),
    "inverse_sqrt": (schedule("inverse_sqrt", min_ratio=0.0), lambda optimizer: get_inverse_sqrt_schedule(
        optimizer, WARMUP)),
    **{f"wsd {shape}": (schedule("wsd", decay_shape=shape), lambda optimizer, shape=shape: get_wsd_schedule(
        optimizer, WARMUP, WSD, num_stable_steps=DECAY - WSD - WARMUP, decay_type=shape, min_lr_ratio=LOWEST / PEAK))
       for shape in ("linear", "cosine", "1-sqrt")},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_equals_transformers_one_step_earlier(name: str) -> None:
    ours, make = TRANSFORMERS[name]
    count = DECAY if name == "cosine" else RUN  # its cosine rises again after its last step
    theirs = rates_of(make, count + 1)
    assert theirs[0] == pytest.approx(LOWEST if ours.kind == "wsd" else 0, **EXACT)
    first = WARMUP - 1 if ours.kind == "wsd" else 0
    assert rates(ours)[first:count] == pytest.approx(theirs[first + 1:], **EXACT)
    same_count = rates(replace(ours, first_number=0))  # --lr_counts_from_0
    first = WARMUP if ours.kind == "wsd" else 0
    assert same_count[first:count] == pytest.approx(theirs[first:count], **EXACT)


def test_one_cycle_equals_torch() -> None:
    theirs = rates_of(lambda optimizer: OneCycleLR(optimizer, PEAK, total_steps=DECAY, pct_start=0.3,
                                                   cycle_momentum=False), DECAY)
    ours = schedule("one_cycle", warmup_steps=18, initial_ratio=1 / 25, min_ratio=1 / 25e4)
    assert rates(ours)[:DECAY] == pytest.approx(theirs, **EXACT)


def test_step_equals_torch() -> None:
    without = {"warmup_steps": 0, "min_ratio": 0.0, "milestone_factor": 0.3}
    assert rates(schedule("step", milestones=(25, 50, 75), **without)) == pytest.approx(
        rates_of(lambda optimizer: StepLR(optimizer, 25, 0.3), RUN), **EXACT)
    assert rates(schedule("step", milestones=(10, 64), **without)) == pytest.approx(
        rates_of(lambda optimizer: MultiStepLR(optimizer, [10, 64], 0.3), RUN), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_survives_json(kind: str) -> None:
    original = schedule(kind, milestones=(30, 45), decay_shape="sqrt")
    assert schedule_from_json(json.loads(json.dumps(dataclasses.asdict(original)))) == original


def test_schedules_of_older_and_newer_versions() -> None:
    older = {"kind": "wsd", "peak": 1.0, "min_ratio": 0.1, "warmup_steps": 4, "decay_steps": 20, "wsd_steps": 5}
    assert [schedule_from_json(older)(step) for step in (0, 14, 15, 19)] == pytest.approx([0.25, 1.0, 0.82, 0.1])
    for newer in ({**older, "kind": "cubic"}, {**older, "cooldown": 3}):
        with pytest.raises(ConfigError, match="Resume with the version that wrote it"):
            schedule_from_json(newer)


TOKENS = 8  # in a sample
RAMP = BatchSizes(((0, 2), (20, 4), (61, 8)))  # positions: 0 2 ... 20 (10 steps), 24 ... 64 (11 steps), 72 80 ...


def planned(train_steps: int, *, batch_sizes: BatchSizes | None = None, peak: float = 0.5, **flags: object
             ) -> Schedule:
    length = RunLength(train_steps, batch_sizes or fixed_batch(4), seq_length=TOKENS)
    arguments = RunArguments(train_steps=train_steps, **flags)
    check_flags(arguments)
    return make_schedule(arguments, peak=peak, length=length)


def test_defaults_are_fractions_of_the_run() -> None:
    assert planned(1000) == Schedule("cosine", 0.5, 0.1, 10, 1000, 0)
    assert planned(1000, lr_schedule="wsd") == Schedule("wsd", 0.5, 0.1, 10, 1000, 200)
    assert planned(1, lr_schedule="wsd") == Schedule("wsd", 0.5, 0.1, 1, 1, 0)
    assert planned(1000, lr_schedule="inverse_sqrt") == Schedule("inverse_sqrt", 0.5, 0.0, 10, 1000, 0)
    assert planned(1000, lr_schedule="one_cycle") == Schedule("one_cycle", 0.5, pytest.approx(4e-6), 300, 1000, 0,
                                                               initial_ratio=0.04)
    assert planned(1000, lr_schedule="step", lr_milestones="8e2,900") == Schedule(
        "step", 0.5, 0.0, 10, 1000, 0, milestones=(800, 900), milestone_factor=0.1)


def test_the_lowest_rate_is_a_fraction_or_a_rate() -> None:
    assert planned(100, min_lr=0.05) == planned(100, min_lr_ratio=0.1)
    with pytest.raises(ConfigError, match=r"--min_lr: found 0\.6; expected at most the peak rate, 0\.5"):
        planned(100, min_lr=0.6)


def test_tokens_are_rounded_up_to_complete_steps() -> None:
    """A step has 4 samples of 8 tokens."""
    got = planned(100, lr_schedule="wsd", lr_warmup_tokens=65, lr_decay_tokens=1600, lr_wsd_tokens=320)
    assert got == planned(100, lr_schedule="wsd", lr_warmup_steps=3, lr_decay_steps=50, lr_wsd_steps=10)
    assert planned(100, lr_warmup_tokens=0).warmup_steps == 0
    for tokens in range(1, 130):
        lengths = planned(100, lr_schedule="wsd", lr_warmup_tokens=tokens, lr_decay_tokens=1600, lr_wsd_tokens=tokens)
        assert lengths.warmup_steps == lengths.wsd_steps == -(-tokens // 32)
    stepped = planned(100, lr_schedule="step", lr_milestone_tokens="1e3,1600", lr_milestone_factor=0.5)
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
    got = planned(40, batch_sizes=RAMP, lr_schedule="wsd", lr_warmup_tokens=24 * TOKENS,
                   lr_decay_tokens=80 * TOKENS, lr_wsd_tokens=24 * TOKENS)
    assert (got.warmup_steps, got.decay_steps, got.wsd_steps) == (11, 23, 4)  # at samples 24, 80 and from 56 on
    assert planned(40, batch_sizes=RAMP, lr_schedule="wsd", lr_decay_tokens=80 * TOKENS,
                   lr_wsd_tokens=24 * TOKENS + 1).wsd_steps == 5
    assert run_length(None, 80 * TOKENS, batch_sizes=RAMP, seq_length=TOKENS).train_steps == 23
    assert run_length(None, 80 * TOKENS + 1, batch_sizes=RAMP, seq_length=TOKENS).train_steps == 24
    assert run_length(7, None, batch_sizes=RAMP, seq_length=TOKENS).train_steps == 7


def test_scaling_of_the_peak_rate() -> None:
    assert rate_factor("linear", batch=1024, reference_batch=256) == 4
    assert rate_factor("sqrt", batch=1024, reference_batch=256) == 2
    assert rate_factor("sqrt", batch=64, reference_batch=256) == 0.5
    assert rate_factor(None, batch=64, reference_batch=None) == 1


_WSD, _STEP = {"lr_schedule": "wsd"}, {"lr_schedule": "step"}


@pytest.mark.parametrize(("flags", "message"), [
    ({"lr_schedule": "cosin"}, 'Did you mean "cosine"'),
    ({"lr_wsd_steps": 5}, "--lr_wsd_steps: found 5 with --lr_schedule cosine; expected no value"),
    ({"lr_wsd_tokens": 5}, "--lr_wsd_tokens: found 5 with"),
    ({"lr_decay_shape": "sqrt"}, "It has an effect on wsd only"),
    ({**_WSD, "lr_decay_shape": "1-sqr"}, 'Did you mean "1-sqrt"'),
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
    ({**_WSD, "lr_wsd_steps": 100}, "--lr_wsd_steps: found 100; expected at least 0 and at most 99"),
    ({**_WSD, "lr_wsd_tokens": 10**6}, "--lr_wsd_tokens: found 100"),
    (_STEP, "--lr_milestones: the flag is missing"),
    ({**_STEP, "lr_milestones": "30,20"}, "--lr_milestones: found 30,20; expected numbers that rise"),
    ({**_STEP, "lr_milestones": "30,x"}, "--lr_milestones: found 30,x"),
    ({**_STEP, "lr_milestones": ""}, "--lr_milestones: found"),
    ({**_STEP, "lr_milestones": "3", "lr_warmup_steps": 4}, "--lr_milestones: found step 3; expected after the 4"),
    ({**_STEP, "lr_milestone_tokens": "3001,3002"}, "expected milestones in different steps"),
    ({**_STEP, "lr_milestones": "30", "lr_milestone_factor": 0.0}, "--lr_milestone_factor: found 0.0"),
    ({"lr_milestones": "30"}, "It has an effect on step only"),
    ({"lr_reference_batch": 4}, "--lr_reference_batch: it has no effect without --lr_scaling"),
    ({"lr_scaling": "sqrt"}, "--lr_scaling: it has no effect without --lr_reference_batch"),
    ({"lr_scaling": "cube", "lr_reference_batch": 4}, "--lr_scaling: found cube"),
    ({"train_tokens": 5}, "--train_steps / --train_tokens: found both"),
])
def test_flags_are_validated(flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(100, **flags)
