"""Small runs that a subcommand trains one after another in a folder: start, skip, resume, and read their losses.

Each run is a process of `ds-pretrain` with a YAML of the folder and some flags; its run folder is runs/NAME.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.cli import say
from pretrain.config.flags.parse import read_yaml
from pretrain.distributed.process import PROGRAM
from pretrain.monitor.read_run_folder import Goodput, is_number, newest_path, read_metrics

RUN_YAML = "run.yaml"
LOSS, VALID_LOSS, TOKENS, NOISE_SCALE = "loss", "eval_loss", "consumed_tokens", "noise_scale"
VALID = "valid"  # split of the only validation set; of several sets: valid/NAME


@dataclass(frozen=True)
class Run:
    """A start of a run: its folder is runs/NAME. `flags` are added to run.yaml."""

    name: str
    ranks: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    keep_checkpoint: bool = True  # false: remove it when the run has finished

    def words(self, flags: Mapping[str, Any]) -> list[str]:
        """Return the words of `ds-pretrain`, with further flags of all runs."""
        words = ["--num_accelerators", str(self.ranks), "--config", RUN_YAML, "--save", f"runs/{self.name}"]
        for name, value in {**self.flags, **flags}.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *map(str, values)]
        return words


def train_runs(runs: Sequence[Run], folder: Path, flags: Mapping[str, Any]) -> dict[str, float]:
    """Check all runs, then train them; finished ones are skipped, and the others resume.

    `flags` belong to all runs. Returns run -> seconds of its steps. Raises CalledProcessError.
    """
    _, train_steps = read_yaml(str(folder / RUN_YAML)).get("train_steps", (0, None))
    last = {run.name: last_step(folder, run.name) for run in runs}
    all_flags = [{"train_steps": train_steps, **run.flags, **flags} for run in runs]
    finished = [_is_finished(last[run.name], given.get("exit_step", given["train_steps"]))
                for run, given in zip(runs, all_flags, strict=True)]
    for run, is_finished in zip(runs, finished, strict=True):
        if not is_finished and "resume_from" not in run.flags:  # the other run does not exist yet
            run_subcommand(folder, "check", "--world_size", str(run.ranks), *run.words(flags)[2:], quiet=True)
    for number, (run, is_finished) in enumerate(zip(runs, finished, strict=True), start=1):
        say(f"run {number} of {len(runs)}: {run.name}")
        if not is_finished:
            run_subcommand(folder, *run.words(flags))
        if not run.keep_checkpoint:
            shutil.rmtree(folder / "runs" / run.name / "checkpoints", ignore_errors=True)
    steps = {run.name: last_step(folder, run.name) for run in runs}
    return {name: Goodput.read(folder / "runs" / name, step).kept_seconds for name, step in steps.items()}


def _is_finished(last: int, steps: Any) -> bool:
    """Return whether the run has logged its last step. Before a run has begun, its `steps` are not validated."""
    return last > 0 and steps is not None and last >= int(str(steps))


def last_step(folder: Path, name: str) -> int:
    """Return the last step that a run has logged; 0 for a run that has not begun."""
    return max((row["step"] for row in read_metrics(folder / "runs" / name)), default=0)


def run_subcommand(folder: Path, *words: str, quiet: bool = False) -> None:
    """Run a subcommand of ds-pretrain in the folder. Raises CalledProcessError."""
    subprocess.run([sys.executable, PROGRAM, *words], cwd=folder, check=True,
                   env={**os.environ, "DS_PRETRAIN_NEXT": "0"}, stdout=subprocess.DEVNULL if quiet else None)


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


def read_curve(run: Path, split: str = VALID) -> Curve:
    """Return the losses of a run folder; without the steps that were trained again.

    `split` names the validation set: valid, or of several sets valid/NAME.
    """
    rows = read_metrics(run)

    def values(key: str, of: str | None) -> dict[int, Any]:
        found = newest_path([row for row in rows if key in row and row.get("split") == of])
        return {row["step"]: row[key] for row in found if is_number(row[key])}

    return Curve(values(LOSS, None), values(VALID_LOSS, split), values(TOKENS, None), values(NOISE_SCALE, None))
