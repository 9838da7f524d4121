"""Learning rates of a run by step, by the flags or by the scheduler of the JSON.

A "scheduler" of the DeepSpeed JSON is computed as a closed formula, without importing deepspeed: those of DeepSpeed
0.19.8 (runtime/lr_schedules.py), with its default values, for an optimizer with one rate.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pretrain.config.plan import Plan

Rate = Callable[[int], float]  # number of applied updates -> rate of the next step, as of `Schedule`
_WARMUP_STEPS, _WARMUP_MAX, _CYCLE_STEPS, _RANGE_STEPS, _RANGE_MIN = 1000, 0.001, 2000, 2000, 1e-3


def rate_of(plan: Plan) -> Rate:
    """Return the learning rate of the next step by the number of applied updates, of the flags or of the JSON."""
    if plan.schedule is not None:
        return plan.schedule
    return json_schedule(plan.get("scheduler.type"), plan.get("scheduler.params", {}),
                         optimizer_rate=float(plan.get("optimizer.params.lr", 0.0)))


def json_schedule(kind: str, params: Mapping[str, Any], *, optimizer_rate: float) -> Rate:
    """Return the rates of a scheduler. `optimizer_rate`: the optimizer's own, which some of them take as the peak."""
    given = {name: value for name, value in params.items() if value is not None}
    if kind == "WarmupCosineLR":
        return _warmup_cosine(given, optimizer_rate)
    if kind == "OneCycle":
        return _one_cycle(given)
    if kind == "LRRangeTest":
        return _range_test(given)
    return _warmup(given, optimizer_rate)


def _rising(params: Mapping[str, Any], done: int) -> float | None:
    """Return the rise of a warm-up from 0 to 1 after `done` updates; None after the warm-up."""
    steps, last = max(2, params.get("warmup_num_steps", _WARMUP_STEPS)), done - 1
    if last >= steps:
        return None
    if params.get("warmup_type") == "linear":
        return max(last, 0) / steps
    return math.log(max(last, 0) + 1) / math.log(steps)


def _warmup(params: Mapping[str, Any], optimizer_rate: float) -> Rate:
    total = params.get("total_num_steps")  # of WarmupDecayLR
    low, steps = params.get("warmup_min_lr", 0.0), max(2, params.get("warmup_num_steps", _WARMUP_STEPS))
    high = params.get("warmup_max_lr", optimizer_rate if total is None else _WARMUP_MAX)

    def rate(done: int) -> float:
        fraction = _rising(params, done)
        if fraction is None:
            fraction = 1.0 if total is None else max(0.0, (total - done + 1) / max(1.0, total - steps))
        return float(low + (high - low) * fraction)

    return rate


def _warmup_cosine(params: Mapping[str, Any], peak: float) -> Rate:
    total, steps = params["total_num_steps"], max(2, params.get("warmup_num_steps", _WARMUP_STEPS))
    first, lowest = params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 0.0001)

    def rate(done: int) -> float:
        fraction = _rising(params, done)
        if done == 0:
            return 0.0
        if fraction is not None:
            return float(peak * (first + (1 - first) * fraction))
        progress = min(1.0, (done - steps) / max(1, total - steps))
        return float(peak * max(0.0, lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2))

    return rate


def _one_cycle(params: Mapping[str, Any]) -> Rate:
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    first = float(params.get("cycle_first_step_size", _CYCLE_STEPS))
    second = float(params.get("cycle_second_step_size", first))
    stairs = params.get("cycle_first_stair_count", 0)
    counts = stairs, params.get("cycle_second_stair_count", stairs)
    decay_rate, decay_steps = params.get("decay_lr_rate", 0.0), params.get("decay_step_size", 0)

    def height(at: float) -> float:
        rises = at <= first
        value, count = (at / first if rises else (first + second - at) / second), counts[0 if rises else 1]
        return math.floor(value * count + 1e-9) / count if count else value

    def rate(done: int) -> float:
        if done == 0:
            return float(low)
        if done - 1 < first + second:
            return float(low + (high - low) * height(done % (first + second)))
        if not decay_steps or not decay_rate:
            return float(low)
        return float(low / (1 + decay_rate * (done - first - second) / decay_steps))

    return rate


def _range_test(params: Mapping[str, Any]) -> Rate:
    low, size = params.get("lr_range_test_min_lr", _RANGE_MIN), params.get("lr_range_test_step_size", _RANGE_STEPS)
    growth, stairs = params.get("lr_range_test_step_rate", 1.0), params.get("lr_range_test_staircase", False)
    return lambda done: float(low * (1 + growth * (math.floor(done / size) if stairs else done / size)))
