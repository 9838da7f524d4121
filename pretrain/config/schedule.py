"""Learning rate of each step as a closed formula, in words, and scaled with the batch size.

ds_configs/recipe.md has the formulas as a table.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.errors import ConfigError

KINDS = ("cosine", "linear", "constant", "wsd", "inverse_sqrt", "step", "one_cycle")
DECAY_SHAPES = ("linear", "sqrt", "1-sqrt", "cosine")  # of wsd
LR_SCALINGS = ("linear", "sqrt")
ONE_CYCLE_INITIAL_RATIO = 1 / 25  # torch.optim.lr_scheduler.OneCycleLR: div_factor


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule of a run; a call returns the rate of one step. Lengths are in applied optimizer updates.

    Steps are numbered from 1. During the warm-up the rate is peak * number / warmup_steps, so the first step has
    peak / warmup_steps, and step number warmup_steps has the peak.
    """

    kind: str  # one of KINDS
    peak: float
    min_ratio: float  # lowest rate as a fraction of the peak
    warmup_steps: int
    decay_steps: int  # number of the first step with the lowest rate; unused by constant, inverse_sqrt and step
    wsd_steps: int  # length of wsd's final decay; 0 for the other schedules
    decay_shape: str = "linear"  # of wsd; one of DECAY_SHAPES
    initial_ratio: float = 0.0  # of one_cycle: rate of the first step as a fraction of the peak
    milestones: tuple[int, ...] = ()  # of step: after each of these numbers of steps, the rate is multiplied
    milestone_factor: float = 1.0  # of step: the multiplier

    def __call__(self, step: int) -> float:
        """Return the learning rate of the next step, after `step` optimizer updates. Skipped updates do not count."""
        number = step + 1
        if number < self.warmup_steps:
            return self._warm_up(number)
        if self.kind == "constant":
            return self.peak
        if self.kind == "inverse_sqrt":
            return self.peak * max(math.sqrt(max(self.warmup_steps, 1) / number), self.min_ratio)
        if self.kind == "step":
            passed = sum(milestone <= step for milestone in self.milestones)
            return self.peak * max(self.milestone_factor**passed, self.min_ratio)
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * self._remaining(number))

    def _warm_up(self, number: int) -> float:
        if self.kind != "one_cycle":
            return self.peak * number / self.warmup_steps
        progress = (number - 1) / (self.warmup_steps - 1)
        return self.peak * (1 + (self.initial_ratio - 1) * _falling("cosine", progress))

    def _remaining(self, number: int) -> float:
        """Return the fraction, from 1 to 0, of the distance between lowest rate and peak."""
        decay_start = self.decay_steps - self.wsd_steps if self.kind == "wsd" else self.warmup_steps
        progress = min(max((number - decay_start) / max(self.decay_steps - decay_start, 1), 0.0), 1.0)
        shapes = {"cosine": "cosine", "one_cycle": "cosine", "linear": "linear", "wsd": self.decay_shape}
        return _falling(shapes[self.kind], progress)


def _falling(shape: str, progress: float) -> float:
    """Return a value that falls from 1 to 0 while `progress` rises from 0 to 1."""
    if shape == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return math.sqrt(1 - progress)
    if shape == "1-sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress


def schedule_from_json(values: Mapping[str, Any]) -> Schedule:
    """Return the schedule that `dataclasses.asdict` wrote. Fields of later versions that are missing have defaults.

    Raises ConfigError for unknown fields, which a newer version may have written.
    """
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(Schedule)})
    if unknown or values.get("kind") not in KINDS:
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
    lowest = f"{schedule.peak * schedule.min_ratio:g}"
    if schedule.kind == "wsd":
        parts.append(f"{schedule.decay_shape} decay in {_count(schedule.wsd_steps, 'step')} until step "
                     f"{schedule.decay_steps:,}, lowest {lowest}")
    elif schedule.kind == "step":
        parts.append(f"x {schedule.milestone_factor:g} after the steps {', '.join(map(str, schedule.milestones))}")
    elif schedule.kind == "inverse_sqrt":
        parts.append(f"lowest {lowest}")
    elif schedule.kind != "constant":
        parts.append(f"lowest {lowest} from step {schedule.decay_steps:,} on")
    return ", ".join(parts)


def rates_text(schedule: Schedule, train_steps: int) -> str:
    """Return the rates of a few steps: the first, the ends of all phases, the middle and the last."""
    steps = {1, schedule.warmup_steps, train_steps // 2, train_steps, schedule.decay_steps,
             *(milestone + 1 for milestone in schedule.milestones)}
    if schedule.wsd_steps:
        steps.add(schedule.decay_steps - schedule.wsd_steps)
    return ", ".join(f"step {step:,}: {schedule(step - 1):.4g}" for step in sorted(steps) if 1 <= step <= train_steps)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
