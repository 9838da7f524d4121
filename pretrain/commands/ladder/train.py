"""Train the runs of a ladder, and read their validation losses."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from pretrain.analysis.scaling.ladder_file import Point
from pretrain.cli import say
from pretrain.commands.ladder.plan import Model, Plan
from pretrain.commands.ladder.target import TargetRun
from pretrain.commands.ladder.times import write_model
from pretrain.commands.small_runs import Run, read_curve, train_runs
from pretrain.data.data_spec import names_of_split
from pretrain.errors import ConfigError


def train_ladder(plan: Plan, target: TargetRun, folder: Path) -> None:
    """Train what is missing: runs with a validation loss at their end are skipped. Raises CalledProcessError."""
    for number, model in enumerate(plan.models, start=1):
        runs = plan.runs(model)
        if all(_final_loss(run, target, folder) is not None for run in runs):
            continue
        say(f"model {number} of {len(plan.models)}: {model.name}, {model.parameters:,} parameters")
        write_model(folder, model.name, model.config)
        train_runs(runs, folder, {})
        shutil.rmtree(folder / "runs" / model.name / "checkpoints", ignore_errors=True)  # the branches have ended


def read_points(plan: Plan, target: TargetRun, folder: Path) -> list[Point]:
    """Return the validation losses: after each decay, and in the stable phase. Raises ConfigError if one is missing."""
    points = []
    for model in plan.models:
        longest, *branches = plan.runs(model)
        start = plan.lengths.decay_start(longest.flags["train_steps"])
        losses = validation_losses(target, folder / "runs" / longest.name)
        points += [_point(plan, model, step, loss, decayed=False) for step, loss in losses.items() if step <= start]
        for run in (*branches, longest):
            loss = _final_loss(run, target, folder)
            if loss is None:
                raise ConfigError(str(folder / "runs" / run.name), problem="the run has no validation loss at its end",
                                  remedy="remove this folder, and give the command again")
            points.append(_point(plan, model, run.flags["train_steps"], loss, decayed=True))
    return points


def _point(plan: Plan, model: Model, step: int, loss: float, *, decayed: bool) -> Point:
    return Point(model.name, float(model.parameters), float(step * plan.batch.tokens), loss, decayed=decayed)


def validation_losses(target: TargetRun, run: Path) -> dict[int, float]:
    """Return the validation loss by step, of several sets their mean; {} if the run does not exist."""
    splits: Sequence[str] = names_of_split(target.plan.datasets, "valid")
    curves = [read_curve(run, split).validation for split in splits]
    steps = set.intersection(*(set(curve) for curve in curves))
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in sorted(steps)}


def _final_loss(run: Run, target: TargetRun, folder: Path) -> float | None:
    return validation_losses(target, folder / "runs" / run.name).get(run.flags["train_steps"])
