"""Conversions of values, by the names in other_programs.yaml, and of durations, schedules and sizes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pretrain.commands.translate.settings import as_number


def minutes_to_seconds(value: Any) -> Any:
    return value * 60


def none_below_zero(value: Any) -> Any:
    """Return None for numbers such as -1, which mean no limit."""
    return None if value < 0 else value


def at_least_two(value: Any) -> Any:
    """Return a number of checkpoints to keep: 0 keeps all, as a missing number does, and others are at least 2."""
    return max(value, 2) if value else 0


def unless_disabled(value: Any) -> Any:
    return value not in (False, "disabled", "false", "False")


def first_number(value: Any) -> Any:
    """Return the first number of a list, or the number itself; None for anything else."""
    return as_number(value[0] if isinstance(value, list) and value else value)


def without_spaces(value: Any) -> Any:
    """Return proportions as --split takes them: 969,30,1."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace(" ", "").replace("/", ",").strip("'\"")


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    function.__name__: function for function in (minutes_to_seconds, none_below_zero, at_least_two, unless_disabled,
                                                 first_number, without_spaces)}


def padded(size: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def end_of_clipped_line(*, warmup: int, end: int, ratio: float) -> int:
    """Return the step at which a line that falls from the peak to 0 at `end` reaches `ratio` of the peak.

    GPT-NeoX (megatron/learning_rates.py) clips the line at its lowest rate; here the line ends at the lowest rate.
    """
    return warmup + round((1 - ratio) * (end - warmup))


def batch_stages(ramp: Sequence[int], *, final: int, seq_length: int) -> str:
    """Return --batch_schedule for Megatron-LM's --rampup-batch-size START INCREMENT SAMPLES.

    The batch grows by INCREMENT after each of equal parts of SAMPLES (core/num_microbatches_calculator.py).
    """
    start, increment, samples = ramp
    increments = (final - start) // increment
    starts = [math.ceil(samples * number / increments) * seq_length for number in range(increments + 1)]
    return ",".join(f"{tokens}:{start + number * increment}" for number, tokens in enumerate(starts))
