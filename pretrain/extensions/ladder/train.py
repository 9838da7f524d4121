"""The runs of a ladder: measure the step times of its models, train them, and read their validation losses."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import say
from pretrain.commands.small_runs import Run, read_curve, run_subcommand, train_runs
from pretrain.data.data_spec import names_of_split
from pretrain.errors import ConfigError
from pretrain.extensions.ladder.ladder_file import Point
from pretrain.extensions.ladder.plan import Batch, Model, Plan
from pretrain.extensions.ladder.target import Size, TargetRun
from pretrain.memory.step_time.calibrate import calibrate, predict_run
from pretrain.memory.step_time.measured_run import MeasuredRun, read_measured_run
from pretrain.memory.step_time.time_parameters import TimeParameters
from pretrain.monitor.read_run_folder import is_number, read_metrics

_STEPS = 8  # steps of a measurement; the first one is not used


@dataclass(frozen=True)
class MeasuredTimes:
    """Step times from the model of pretrain/memory/step_time, calibrated with measurements."""

    measured: MeasuredRun
    parameters: TimeParameters
    start_seconds: float  # time of a run without its steps

    def step_seconds(self, size: Size, batch: Batch) -> float:
        """Return the seconds of a training step."""
        ranks = self.measured.layout.data_parallel_size
        layout = replace(self.measured.layout, micro_batch_size=batch.micro_batch_size, seq_length=batch.seq_length,
                         gradient_accumulation_steps=batch.global_batch_size // batch.micro_batch_size // ranks)
        return predict_run(replace(self.measured, layout=layout, model=size.config), self.parameters).total_seconds


def measure_times(sizes: Sequence[Size], batch: Batch, folder: Path, *, ranks: int) -> MeasuredTimes:
    """Train a few steps of each model, and calibrate the model of the step time. Raises CalledProcessError."""
    names = [f"time-{size.name}" for size in sizes]
    starts = [_measure(name, size, batch, folder, ranks) for name, size in zip(names, sizes, strict=True)]
    paths = [str(folder / "runs" / name) for name in names]
    calibration = calibrate(paths)
    return MeasuredTimes(read_measured_run(paths[-1]), calibration.parameters, max(starts))


def _measure(name: str, size: Size, batch: Batch, folder: Path, ranks: int) -> float:
    """Train a few steps. Returns the seconds of the start and the end, without the steps."""
    say(f"measuring the step time of {size.name}")
    run = folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    write_model(folder, size.name, size.config.hf_config)
    flags = {"model": f"models/{size.name}.json", "learning_rate": 1e-4, "train_steps": _STEPS, "log_interval": 1,
             "global_batch_size": batch.global_batch_size, "micro_batch_size": batch.micro_batch_size,
             "lr_warmup_steps": 1, "eval_interval": 0, "eval_steps": 1, "save_interval": 0}
    begin = time.monotonic()
    run_subcommand(folder, *Run(name, ranks, flags).words({}), quiet=True)
    seconds = time.monotonic() - begin
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return seconds - sum(row["step_time_ms"] / 1e3 for row in read_metrics(run) if is_number(row.get("step_time_ms")))


def write_model(folder: Path, name: str, values: dict[str, Any]) -> None:
    """Write OUT/models/NAME.json, the model's config.json."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "models" / f"{name}.json", json.dumps(values, indent=1) + "\n")


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
