"""Notes about learning rates that hardly fit the length of a run, from the rates of its steps alone."""

import math
from collections.abc import Callable

from pretrain.config.json_schedule import json_schedule
from pretrain.config.plan import Plan

# GPT-3 was trained with the lowest rate in the last 13% of its steps (arXiv 2005.14165, appendix B)
_LONGEST_TAIL = 0.2  # fraction of the run
_LONGEST_TAIL_AT_0 = 0.01
_ALMOST_0, _LOW, _HIGH = 1e-3, 0.5, 0.3  # fractions of the highest rate
_SAME = 1e-9
_SHOULD_END = "a decay usually ends where the run ends"
_LOOKED_AT = 4000  # steps of a run whose rates are computed, evenly spread
_BEYOND = 64  # lengths of the run after which a schedule has ended


def rate_of(plan: Plan) -> Callable[[int], float]:
    """Return the learning rate of the next step by the number of applied updates, of the flags or of the JSON."""
    if plan.schedule is not None:
        return plan.schedule
    return json_schedule(plan.get("scheduler.type"), plan.get("scheduler.params", {}),
                         optimizer_rate=float(plan.get("optimizer.params.lr", 0.0)))


def rate_notes(plan: Plan) -> list[str]:
    """Return notes about the rates of a run: a long end at the lowest rate, a warm-up or a decay that it cuts off."""
    flag = "the JSON's scheduler" if plan.schedule is None else f"--lr_schedule {plan.schedule.kind}"
    note = length_note(rate_of(plan), plan.train_steps)
    return [f"{flag}: {note}"] if note else []


def length_note(rate: Callable[[int], float], steps: int) -> str:
    """Return what is unusual about the rates of a run of `steps` steps; "": nothing.

    `rate`: the rate of the next step, after so many updates.
    """
    sampled = sorted({round(index * (steps - 1) / _LOOKED_AT) for index in range(_LOOKED_AT + 1)})
    highest = max(map(rate, sampled))
    if highest <= 0:
        return f"the learning rate is 0 in all {steps:,} steps"
    last, first = rate(steps - 1), _first_of_end(rate, sampled)
    at_end = steps - first
    is_0 = last <= _ALMOST_0 * highest
    falls = first > 1 and rate(first - 2) > rate(first - 1) > last  # not one of several steps down
    allowed = _LONGEST_TAIL_AT_0 if is_0 else _LONGEST_TAIL
    if at_end > max(allowed * steps, 1) and (is_0 or (falls and last < _LOW * highest)):
        return f"the learning rate reaches its lowest value, {last:.3g}, at step {first + 1:,}, and {at_end - 1:,} " \
               f"of the {steps:,} steps follow with it ({at_end / steps:.0%}); {_SHOULD_END}"
    return _cut_off_note(rate, steps, highest)


def _first_of_end(rate: Callable[[int], float], sampled: list[int]) -> int:
    """Return the number of updates after which all steps of the run have the rate of the last one."""
    last = rate(sampled[-1])

    def differs(done: int) -> bool:
        return not math.isclose(rate(done), last, rel_tol=_SAME, abs_tol=0)

    before = next((number for number in range(len(sampled) - 1, -1, -1) if differs(sampled[number])), None)
    if before is None:
        return 0
    return next(done for done in range(sampled[before + 1], sampled[before], -1) if differs(done - 1))


def _cut_off_note(rate: Callable[[int], float], steps: int, highest: float) -> str:
    """Return a note if the run ends in the warm-up, or before most of a decay that ends later; else ""."""
    last, end = rate(steps - 1), rate(_BEYOND * steps)
    if last >= highest and rate(steps) > last:
        return f"the learning rate still rises when the run ends: it is {last:.3g} in the last step, {steps:,}, and " \
               f"{rate(2 * steps):.3g} would follow {steps:,} steps later; the warm-up is longer than the run"
    ended = math.isclose(end, rate(_BEYOND * steps - 1), rel_tol=_SAME, abs_tol=0)
    if steps > 1 and ended and end < _LOW * last and rate(steps - 2) > last > _HIGH * highest:
        return f"the run ends at step {steps:,} with the learning rate {last:.3g}, {last / highest:.0%} of the " \
               f"highest one, and before the decay to {end:.3g}; {_SHOULD_END}"
    return ""
