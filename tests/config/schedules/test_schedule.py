"""Rates of every schedule: independent closed forms, transformers' and torch's schedulers, and the JSON round trip."""

import dataclasses
import json
import math
from collections.abc import Callable

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

from pretrain.config.schedules.schedule import DECAY_SHAPES, KINDS, Schedule, schedule_from_json
from pretrain.errors import ConfigError

PEAK, WARMUP, DECAY, WSD, LOWEST, RUN = 3e-4, 7, 60, 20, 2.4e-5, 80
EXACT = {"rel": 1e-12, "abs": 0}


def schedule(kind: str, **changes: object) -> Schedule:
    values: dict = {"kind": kind, "peak": PEAK, "min_ratio": LOWEST / PEAK, "warmup_steps": WARMUP,
                    "decay_steps": DECAY, "wsd_steps": WSD if kind == "wsd" else 0}
    return Schedule(**{**values, **changes})


def rates(schedule: Schedule) -> list[float]:
    return [schedule(step) for step in range(RUN)]


def cosine(n: int) -> float:
    return LOWEST + (PEAK - LOWEST) * math.cos(math.pi / 2 * min((n - WARMUP) / (DECAY - WARMUP), 1)) ** 2


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


CLOSED_FORMS: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "cosine": (schedule("cosine"), cosine),
    "linear": (schedule("linear"), linear),
    "constant": (schedule("constant"), lambda n: PEAK),
    "inverse_sqrt": (schedule("inverse_sqrt", min_ratio=0.5), lambda n: max(PEAK * WARMUP**0.5 * n**-0.5, PEAK / 2)),
    "step": (schedule("step", milestones=(30, 45), milestone_factor=0.25), steps),
    **{f"wsd {shape}": (schedule("wsd", decay_shape=shape), wsd(shape)) for shape in DECAY_SHAPES},
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_every_schedule_equals_its_closed_form(name: str) -> None:
    got, after_warm_up = CLOSED_FORMS[name]
    expected = [PEAK * n / WARMUP if n < WARMUP else after_warm_up(n) for n in range(1, RUN + 1)]
    assert rates(got) == pytest.approx(expected, **EXACT)
    assert rates(got)[0] == PEAK / WARMUP  # near zero, but never zero


def test_one_cycle_equals_its_closed_form() -> None:
    rise = [PEAK / 10 + (PEAK - PEAK / 10) * math.sin(math.pi / 2 * (n - 1) / (WARMUP - 1)) ** 2
            for n in range(1, WARMUP)]
    assert rates(schedule("one_cycle", initial_ratio=0.1)) == pytest.approx(
        rise + [cosine(n) for n in range(WARMUP, RUN + 1)], **EXACT)


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


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_a_schedule_survives_json(name: str) -> None:
    original = CLOSED_FORMS[name][0]
    assert schedule_from_json(json.loads(json.dumps(dataclasses.asdict(original)))) == original


def test_schedules_of_older_and_newer_versions() -> None:
    older = {"kind": "wsd", "peak": 1.0, "min_ratio": 0.1, "warmup_steps": 4, "decay_steps": 20, "wsd_steps": 5}
    assert [schedule_from_json(older)(step) for step in (0, 14, 15, 19)] == pytest.approx([0.25, 1.0, 0.82, 0.1])
    for newer in ({**older, "kind": "cubic"}, {**older, "cooldown": 3}):
        with pytest.raises(ConfigError, match="Resume with the version that wrote it"):
            schedule_from_json(newer)
