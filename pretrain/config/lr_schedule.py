"""Learning-rate schedule and length of a run: pure functions of plain values."""

import dataclasses
import math
from dataclasses import dataclass

from pretrain.errors import ConfigError

KINDS = ("cosine", "linear", "constant", "wsd")
DEFAULT_WARMUP_FRACTION = 0.01  # of the run
DEFAULT_WSD_FRACTION = 0.2  # of the steps until --lr_decay_steps


def learning_rate(step: int, *, peak: float, min_ratio: float, kind: str, warmup_steps: int, decay_steps: int,
                  wsd_steps: int) -> float:
    """Return the learning rate of the next step, after `step` optimizer updates. Steps that fp16 skips do not count.

    Steps are numbered from 1. The first step has peak / warmup_steps, and step number warmup_steps has the peak. From
    step number decay_steps on, the rate is peak * min_ratio. "constant" keeps the peak. "wsd" keeps it until wsd_steps
    before decay_steps.
    """
    step_number = step + 1
    if step_number < warmup_steps:
        return peak * step_number / warmup_steps
    if kind == "constant":
        return peak
    decay_start = decay_steps - wsd_steps if kind == "wsd" else warmup_steps
    progress = min(max((step_number - decay_start) / max(decay_steps - decay_start, 1), 0.0), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return peak * (min_ratio + (1 - min_ratio) * remaining)


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule of a run; a call returns the rate of one step."""

    kind: str
    peak: float
    min_ratio: float  # lowest rate as a fraction of the peak
    warmup_steps: int
    decay_steps: int  # number of the first step with the lowest rate
    wsd_steps: int  # length of wsd's final decay; 0 for the other schedules

    def __call__(self, step: int) -> float:
        """Return the learning rate of the next step, after `step` optimizer updates."""
        return learning_rate(step, **dataclasses.asdict(self))


def run_steps(train_steps: int | None, train_tokens: int | None, *, tokens_per_step: int) -> int:
    """Return the number of optimizer steps of a run. A length in tokens is rounded up to complete steps."""
    if train_steps is not None:
        return train_steps
    if train_tokens is None:
        raise ValueError("one of train_steps and train_tokens is required")
    return -(-train_tokens // tokens_per_step)


def default_warmup_steps(train_steps: int) -> int:
    """Return 1% of the run, at least one step."""
    return max(1, round(DEFAULT_WARMUP_FRACTION * train_steps))


def make_schedule(kind: str, *, peak: float, min_ratio: float, train_steps: int, warmup_steps: int | None = None,
                  decay_steps: int | None = None, wsd_steps: int | None = None) -> Schedule:
    """Return the schedule that the --lr_* flags describe. None selects a flag's default.

    Raises:
        ConfigError: if the warm-up is longer than the run, if the decay ends before the warm-up does, or if wsd's final
            decay does not fit between them.
    """
    warmup_steps = default_warmup_steps(train_steps) if warmup_steps is None else warmup_steps
    decay_steps = train_steps if decay_steps is None else decay_steps
    _check_range("--lr_warmup_steps", warmup_steps, 0, train_steps, "the run")
    if kind != "constant":
        _check_range("--lr_decay_steps", decay_steps, max(warmup_steps, 1))
    if kind == "wsd":
        longest = decay_steps - warmup_steps
        if wsd_steps is None:
            wsd_steps = min(max(1, round(DEFAULT_WSD_FRACTION * decay_steps)), longest)
        _check_range("--lr_wsd_steps", wsd_steps, 0, longest, "the steps between warm-up and --lr_decay_steps")
    return Schedule(kind, peak, min_ratio, warmup_steps, decay_steps, wsd_steps if kind == "wsd" and wsd_steps else 0)


def _check_range(flag: str, value: int, low: int, high: int | None = None, meaning: str = "") -> None:
    if value < low or (high is not None and value > high):
        limit = "" if high is None else f" and at most {high} ({meaning})"
        raise ConfigError(flag, found=value, expected=f"at least {low}{limit} steps")
