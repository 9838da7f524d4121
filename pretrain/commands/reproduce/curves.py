"""What is read from the runs of a recipe, and the form of a result."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.monitor.read_run_folder import is_number, newest_path, read_metrics

_NUMBER = re.compile(r"\d+(\.\d+)?")
LOSS, VALID_LOSS, TOKENS, NOISE_SCALE = "loss", "eval_loss", "consumed_tokens", "noise_scale"


@dataclass(frozen=True)
class Curve:
    """The losses of a run by step."""

    training: dict[int, float]
    validation: dict[int, float]
    tokens: dict[int, int] = field(default_factory=dict)  # consumed tokens at each step of `training`
    noise_scale: dict[int, float] = field(default_factory=dict)  # in samples, with --noise_scale_interval

    @property
    def final(self) -> float | None:
        """The last validation loss."""
        return self.validation[max(self.validation)] if self.validation else None

    def steps_to(self, loss: float) -> float | None:
        """Return the step at which the validation loss reaches a value, interpolated; None if it never does."""
        before: tuple[int, float] | None = None
        for step, found in sorted(self.validation.items()):
            if found <= loss:
                return step if before is None else step - (step - before[0]) * (loss - found) / (before[1] - found)
            before = step, found
        return None


@dataclass(frozen=True)
class Result:
    """Whether an expectation is met, in a line of text."""

    is_met: bool
    text: str


def read_curve(run: Path) -> Curve:
    """Return the losses of a run folder; without those of steps that were trained again."""
    def values(key: str, split: Any) -> dict[int, Any]:
        rows = newest_path([row for row in read_metrics(run) if key in row and row.get("split") == split])
        return {row["step"]: row[key] for row in rows if is_number(row[key])}

    return Curve(values(LOSS, None), values(VALID_LOSS, "valid"), values(TOKENS, None), values(NOISE_SCALE, None))


def sweep_of(name: str) -> str:
    """Return the sweep that a run belongs to: its name without the number at the end, such as w64 of w64-0.001."""
    sweep, _, number = name.rpartition("-")
    return sweep if sweep and _NUMBER.fullmatch(number) else name


def runs_of(sweep: str, curves: Mapping[str, Curve]) -> dict[float, Curve]:
    """Return the runs SWEEP-NUMBER of a sweep by their numbers, in ascending order."""
    names = [name for name in curves if sweep_of(name) == sweep != name]
    return dict(sorted((float(name.rpartition("-")[2]), curves[name]) for name in names))
