"""Learning rate of each step as a closed formula, in words, and scaled with the batch size.

A schedule is a row of KINDS. pretrain/pages/recipe.md has the formulas as a table.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.errors import ConfigError
from pretrain.own_code import is_own, own_code_failed, own_function

DECAY_SHAPES = ("linear", "sqrt", "1-sqrt", "cosine")  # of wsd
LR_SCALINGS = ("linear", "sqrt")
# flags that have an effect on some schedules only
_DECAY = ("lr_decay_steps", "lr_decay_tokens")
_WSD = ("lr_wsd_steps", "lr_wsd_tokens", "lr_decay_shape")
_MILESTONES = ("lr_milestones", "lr_milestone_tokens", "lr_milestone_factor")
_LOWEST = ("min_lr_ratio", "min_lr")
# flag -> the field of Schedule that it sets
FIELD_OF_FLAG = {
    "lr_schedule": "kind", "lr_warmup_steps": "warmup_steps", "lr_warmup_tokens": "warmup_steps",
    "lr_decay_steps": "decay_steps", "lr_decay_tokens": "decay_steps", "lr_wsd_steps": "wsd_steps",
    "lr_wsd_tokens": "wsd_steps", "lr_decay_shape": "decay_shape", "lr_milestones": "milestones",
    "lr_milestone_tokens": "milestones", "lr_milestone_factor": "milestone_factor", "min_lr_ratio": "min_ratio",
    "min_lr": "min_ratio", "lr_counts_from_0": "first_number",
}


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule of a run; a call returns the rate of one step. Lengths are in applied optimizer updates.

    Steps are numbered from `first_number`. During the warm-up the rate is peak * number / warmup_steps: if the first
    number is 1, the first step has peak / warmup_steps, and step number warmup_steps has the peak.
    """

    kind: str  # a key of KINDS
    peak: float
    min_ratio: float  # lowest rate as a fraction of the peak
    warmup_steps: int
    # number of the first step with the lowest rate; of a schedule of the user's code, the steps of the run; unused
    # unless `Kind.decays`
    decay_steps: int
    wsd_steps: int  # length of wsd's final decay; 0 for the other schedules
    decay_shape: str = "linear"  # of wsd; one of DECAY_SHAPES
    initial_ratio: float = 0.0  # of one_cycle: rate of the first step as a fraction of the peak
    milestones: tuple[int, ...] = ()  # of step: after each of these numbers of steps, the rate is multiplied
    milestone_factor: float = 1.0  # of step: the multiplier
    first_number: int = 1  # 0: as transformers and Megatron-LM count, each step has the rate of the step before it

    def __call__(self, step: int) -> float:
        """Return the learning rate of the next step, after `step` optimizer updates. Skipped updates do not count."""
        number, kind = step + self.first_number, KINDS[self.kind]
        if number >= self.warmup_steps:
            return self.peak * kind.fraction(self, number)
        if kind.initial_ratio is None:
            return self.peak * number / self.warmup_steps
        progress = (number - self.first_number) / (self.warmup_steps - self.first_number)
        return self.peak * (1 + (self.initial_ratio - 1) * _falling("cosine", progress))


def _falling(shape: str, progress: float) -> float:
    """Return a value that falls from 1 to 0 while `progress` rises from 0 to 1."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return math.sqrt(1 - progress)
    if shape == "1-sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress


def _decay(schedule: Schedule, number: int, shape: str, first: int) -> float:
    """Fall from the peak, at step number `first`, to the lowest rate, at step number `decay_steps`."""
    progress = min(max((number - first) / max(schedule.decay_steps - first, 1), 0.0), 1.0)
    return schedule.min_ratio + (1 - schedule.min_ratio) * _falling(shape, progress)


def _cosine(schedule: Schedule, number: int) -> float:
    return _decay(schedule, number, "cosine", schedule.warmup_steps)


def _linear(schedule: Schedule, number: int) -> float:
    return _decay(schedule, number, "linear", schedule.warmup_steps)


def _warmup_stable_decay(schedule: Schedule, number: int) -> float:
    return _decay(schedule, number, schedule.decay_shape, schedule.decay_steps - schedule.wsd_steps)


def _inverse_sqrt(schedule: Schedule, number: int) -> float:
    return max(math.sqrt(max(schedule.warmup_steps, 1) / number), schedule.min_ratio)


def _steps(schedule: Schedule, number: int) -> float:
    passed = sum(milestone < number for milestone in schedule.milestones)
    return max(schedule.milestone_factor**passed, schedule.min_ratio)


@dataclass(frozen=True)
class Kind:
    """A value of --lr_schedule: its formula, the flags that have an effect on it, and their defaults."""

    fraction: Callable[[Schedule, int], float]
    """rate of a step after the warm-up, as a fraction of the peak; the argument is the step's number, from 1"""
    flags: tuple[str, ...] = ()  # besides the flags of the warm-up and the peak
    min_ratio: float = 0.1
    warmup_fraction: float = 0.01  # of the run
    least_warmup_steps: int = 0
    initial_ratio: float | None = None  # rate of the first step, from which it rises as a cosine; None: linearly from 0

    @property
    def decays(self) -> bool:
        """Return whether the rate is the lowest from step number `decay_steps` on."""
        return _DECAY[0] in self.flags


KINDS = {
    "cosine": Kind(_cosine, (*_DECAY, *_LOWEST)),
    "linear": Kind(_linear, (*_DECAY, *_LOWEST)),
    "constant": Kind(lambda schedule, number: 1.0),
    "wsd": Kind(_warmup_stable_decay, (*_DECAY, *_WSD, *_LOWEST)),
    "inverse_sqrt": Kind(_inverse_sqrt, _LOWEST, min_ratio=0.0, least_warmup_steps=1),
    "step": Kind(_steps, (*_MILESTONES, *_LOWEST), min_ratio=0.0),
    # torch.optim.lr_scheduler.OneCycleLR: pct_start, div_factor, final_div_factor
    "one_cycle": Kind(_cosine, (*_DECAY, *_LOWEST), min_ratio=1 / 25 * 1e-4, warmup_fraction=0.3,
                      initial_ratio=1 / 25),
}


def import_schedule(name: str) -> None:
    """Add the schedule that --lr_schedule names as my_module:function to KINDS. Raises ConfigError.

    The function gets the number of the step, from 1, and the steps of the run, and returns the rate as a fraction of
    the peak. It applies after the warm-up, which is one step by default.
    """
    where = f"--lr_schedule {name}"
    function = own_function(name, where, "my_module:schedule")

    def fraction(schedule: Schedule, number: int) -> float:
        try:
            return float(function(number, schedule.decay_steps))
        except Exception as error:
            raise own_code_failed(where, f"the schedule at step {number}", error) from error

    KINDS[name] = Kind(fraction, warmup_fraction=0.0)


def check_own_schedule(schedule: Schedule, train_steps: int) -> None:
    """Raise ConfigError if a schedule of the user's code fails, or returns no rate. Of a long run, 1,000 steps."""
    if not is_own(schedule.kind):
        return
    for step in {*range(0, train_steps, max(1, train_steps // 1000)), train_steps - 1}:
        if not (0 <= (rate := schedule(step)) < math.inf):  # False for NaN
            raise ConfigError(f"--lr_schedule {schedule.kind}", found=f"the rate {rate:g} at step {step + 1}",
                              expected="a finite number from 0", remedy="return a fraction of the peak rate")


def _not_imported(schedule: Schedule, number: int) -> float:
    raise ConfigError(f"--lr_schedule {schedule.kind}", problem="the run had this schedule of the user's code, which a "
                      "record alone never imports", remedy="give the flag again")


def schedule_from_json(values: Mapping[str, Any]) -> Schedule:
    """Return the schedule that `dataclasses.asdict` wrote. Fields of later versions that are missing have defaults.

    Raises ConfigError for unknown fields, which a newer version may have written.
    """
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(Schedule)})
    if is_own(kind := values.get("kind")):
        KINDS.setdefault(str(kind), Kind(_not_imported))
    if unknown or values.get("kind") not in tuple(KINDS):  # the value may be of any type
        found = f"the field {unknown[0]}" if unknown else f"kind {values.get('kind')}"
        raise ConfigError("learning-rate schedule", found=found, expected="a schedule that this version supports",
                          remedy="resume with the version that wrote it")
    return Schedule(**{**values, "milestones": tuple(values.get("milestones", ()))})


def rate_factor(scaling: str | None, *, batch: int, reference_batch: int | None) -> float:
    """Return the factor of the peak rate: batch / reference_batch, its square root, or 1 without scaling.

    linear: arXiv 1706.02677, for SGD. sqrt: arXiv 2205.10287, for Adam. The batch is the final one of --batch_schedule.
    """
    if scaling is None or reference_batch is None:
        return 1.0
    ratio = batch / reference_batch
    return ratio if scaling == "linear" else math.sqrt(ratio)


def schedule_text(schedule: Schedule) -> str:
    """Describe a schedule: `wsd, peak 0.0003, 10 warm-up steps, linear decay in the last 200 steps to 3e-05`."""
    parts = [schedule.kind, f"peak {schedule.peak:g}", _count(schedule.warmup_steps, "warm-up step")]
    lowest, kind = f"{schedule.peak * schedule.min_ratio:g}", KINDS[schedule.kind]
    if _WSD[0] in kind.flags:
        parts.append(f"{schedule.decay_shape} decay in {_count(schedule.wsd_steps, 'step')} until step "
                     f"{schedule.decay_steps:,}, lowest {lowest}")
    elif schedule.milestones:
        parts.append(f"x {schedule.milestone_factor:g} after the steps {', '.join(map(str, schedule.milestones))}")
    elif kind.decays:
        parts.append(f"lowest {lowest} from step {schedule.decay_steps:,} on")
    elif kind.flags:
        parts.append(f"lowest {lowest}")
    if schedule.first_number == 0:
        parts.append("steps counted from 0")
    return ", ".join(parts)


def phases_text(schedule: Schedule) -> str:
    """Describe a schedule by its steps: `cosine, warm-up to 0.002 at step 20, lowest rate 0.0002 from step 30 on`."""
    text, kind = f"{schedule.kind}, warm-up to {schedule.peak:g} at step {schedule.warmup_steps}", KINDS[schedule.kind]
    if kind.decays:
        text += f", lowest rate {schedule.peak * schedule.min_ratio:g} from step {schedule.decay_steps} on"
    if _WSD[0] in kind.flags:
        text += f", {schedule.decay_shape} decay in the last {schedule.wsd_steps} steps"
    return text + (", counted from 0" if schedule.first_number == 0 else "")


def rates_text(schedule: Schedule, train_steps: int) -> str:
    """Return the rates of a few steps: the first, the ends of all phases, the middle and the last."""
    steps = {1, schedule.warmup_steps, train_steps // 2, train_steps, schedule.decay_steps,
             *(milestone + 1 for milestone in schedule.milestones)}
    if schedule.wsd_steps:
        steps.add(schedule.decay_steps - schedule.wsd_steps)
    return ", ".join(f"step {step:,}: {schedule(step - 1):.4g}" for step in sorted(steps) if 1 <= step <= train_steps)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
