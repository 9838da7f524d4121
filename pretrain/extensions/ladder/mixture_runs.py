"""Small runs of a blend with different weights, the data mixing laws of their losses, and proposed weights."""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.active_extensions import extensions
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import say
from pretrain.commands.small_runs import RUN_YAML, VALID, Run, read_curve, train_runs
from pretrain.config.flags.parse import read_yaml
from pretrain.data.data_spec import DataSpec, absolute_words, parse_data_spec
from pretrain.errors import ConfigError
from pretrain.extensions.ladder.expected_curve import LEVEL
from pretrain.extensions.ladder.mixture_law import (
    MixtureLaw,
    MixtureRun,
    Proposal,
    choose_parts,
    fewest_runs,
    fit_mixtures,
    propose,
)
from pretrain.extensions.ladder.target import DATA_SETTINGS, say_left_out
from pretrain.monitor.curve import Expected

MIXTURES_JSON, FORMAT = "mixtures.json", "ds-pretrain mixtures 1"
_DATA, _PATHS = ("train_data", "valid_data", "test_data"), ("model", "deepspeed_config", "tokenizer", *DATA_SETTINGS)
_NOT_KEPT = ("save", "resume", "eval_interval", "save_interval", "keep_best",
             *(name for each in extensions() for name in each.flags if name not in DATA_SETTINGS))
_NOT_SUPPORTED = ("blend_schedule", "resume_from")


@dataclass(frozen=True)
class Grade:
    """A blend whose losses were predicted before its run was trained."""

    parts: list[float]
    predicted: dict[str, Expected]
    measured: dict[str, float]  # empty: not trained yet


@dataclass(frozen=True)
class Mixtures:
    """The content of mixtures.json."""

    domains: dict[str, str]  # name -> prefix
    runs: list[MixtureRun]
    laws: dict[str, MixtureLaw]
    grade: Grade
    proposal: Proposal
    format: str = FORMAT


def mixtures_main(target: str, out: Path, count: int, *, ranks: int = 1) -> int:
    """Train `count` small runs and one more that the laws predict, and return the exit code. Raises ConfigError.

    target: YAML of a small run: its train_data names the domains, whose weights are those of the predicted run, and its
        valid_data the sets whose losses count.
    """
    spec = _read_blend(target, count)
    write_settings(target, out)
    names = _names(spec.train)
    total = sum(spec.weights or [1.0] * len(names))
    own = [round(weight / total, 4) for weight in spec.weights or [1.0] * len(names)]
    blends = choose_parts(len(names), count, taken=[own])
    sets = {split.removeprefix(f"{VALID}/"): split for split, _ in spec.valid}
    try:
        runs = _train(blends, spec, out, sets, ranks)
        print("\n".join(run_lines(names, runs)), flush=True)
        try:
            laws = fit_mixtures(runs)
        except ValueError as error:
            raise ConfigError(str(out), problem=str(error), remedy="train more blends with --mixtures") from None
        mixtures = Mixtures(dict(zip(names, map(os.path.abspath, spec.train), strict=True)), runs, laws,
                            Grade(own, {name: law.predict(own) for name, law in laws.items()}, {}),
                            propose(laws, blends))
        _write(out, mixtures)  # before the run that is predicted
        [predicted] = _train([own], spec, out, sets, ranks)
    except subprocess.CalledProcessError as error:
        say(f"stopped: {shlex.join(['ds-pretrain', *error.cmd[2:]])} ended with exit code {error.returncode}")
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    mixtures = Mixtures(mixtures.domains, runs, laws, Grade(own, mixtures.grade.predicted, predicted.losses),
                        mixtures.proposal)
    _write(out, mixtures)
    print("\n".join(result_lines(mixtures)))
    say(f"written: {out / MIXTURES_JSON}")
    return 0


def _read_blend(target: str, count: int) -> DataSpec:
    """Return the data of the target. Raises ConfigError if its blend has no law."""
    keys = read_yaml(target)
    words = {name: keys[name][1] for name in _DATA if name in keys}
    spec = parse_data_spec(words.get("train_data"), valid_data=words.get("valid_data"))
    where = f"--target {target}"
    for name in _NOT_SUPPORTED:
        if name in keys:
            raise ConfigError(f"{where}: {name}", problem="the runs of --mixtures keep their weights, and begin at "
                              "step 0", remedy="remove the key from a copy of the file")
    if len(spec.train) < 2:
        raise ConfigError(where, problem=f"train_data has {len(spec.train)} prefixes; --mixtures needs at least two",
                          remedy="give train_data: [0.5, PREFIX, 0.5, PREFIX]")
    if len(spec.valid) < 2:
        raise ConfigError(where, problem="valid_data has fewer than two sets; --mixtures predicts the loss of each one",
                          remedy="give valid_data: [NAME=PREFIX, NAME=PREFIX]")
    if "train_steps" not in keys:
        raise ConfigError(where, problem="train_steps is missing", remedy="give the number of steps of a small run")
    if count < fewest_runs(len(spec.train)):
        raise ConfigError("--mixtures", found=count, expected=f"at least {fewest_runs(len(spec.train))} runs for "
                          f"{len(spec.train)} domains")
    return spec


def write_settings(target: str, out: Path) -> None:
    """Write OUT/run.yaml: the target's keys, with absolute paths. Raises ConfigError if it exists with other keys."""
    given = {name: value for name, (_, value) in read_yaml(target).items()}
    say_left_out(name for name in given if name in _NOT_KEPT)
    keys: dict[str, Any] = {name: value for name, value in given.items() if name not in _NOT_KEPT}
    for name in _DATA:
        if name in keys:
            keys[name] = absolute_words(keys[name])
    for name in _PATHS:
        if os.path.exists(str(keys.get(name))):
            keys[name] = os.path.abspath(keys[name])
    text = yaml.safe_dump({**keys, "resume": "auto", "eval_interval": 0, "save_interval": 0}, sort_keys=False)
    file = out / RUN_YAML
    try:
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ConfigError(f"--out {out}", problem="its runs have other settings", remedy="name another folder")
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except OSError as error:
        raise ConfigError(f"--out {out}", problem=f"it cannot be written ({error.strerror})") from None


def _names(prefixes: Sequence[str]) -> list[str]:
    """Return the names of the domains: the file names, or the prefixes if two are equal."""
    names = [Path(prefix).name for prefix in prefixes]
    return names if len(set(names)) == len(names) else list(prefixes)


def _train(blends: Sequence[Sequence[float]], spec: DataSpec, out: Path, sets: Mapping[str, str],
           ranks: int) -> list[MixtureRun]:
    """Train a run of each blend, unless it is finished, and read its losses. Raises CalledProcessError, ConfigError."""
    runs = []
    for parts in blends:
        words = [word for part, prefix in zip(parts, map(os.path.abspath, spec.train), strict=True)
                 for word in (part, prefix)]
        name = "mix-" + "-".join(f"{1000 * part:.0f}" for part in parts)
        runs.append(Run(name, ranks, {"train_data": words}, keep_checkpoint=False))
    train_runs(runs, out, {})
    found = []
    for run, parts in zip(runs, blends, strict=True):
        losses = {name: read_curve(out / "runs" / run.name, split).final for name, split in sets.items()}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        if len(known) < len(losses):
            raise ConfigError(str(out / "runs" / run.name), problem="the run has no validation loss at its end",
                              remedy="remove this folder, and give the command again")
        found.append(MixtureRun(run.name, list(parts), known))
    return found


def _write(out: Path, mixtures: Mixtures) -> None:
    write_atomically(out / MIXTURES_JSON, json.dumps(asdict(mixtures), indent=1, allow_nan=False) + "\n")


def run_lines(names: Sequence[str], runs: Sequence[MixtureRun]) -> list[str]:
    """Return the table of the runs: parts of the domains, and losses of the sets."""
    sets = list(runs[0].losses)
    width = max(8, *map(len, [*names, *sets]))
    return [f"{'part of':<{width * len(names) + 2 * len(names)}}loss of",
            "  ".join(f"{name:>{width}}" for name in (*names, *sets)),
            *("  ".join([*(f"{part:>{width}.3f}" for part in run.parts),
                         *(f"{run.losses[name]:>{width}.4f}" for name in sets)]) for run in runs)]


def result_lines(mixtures: Mixtures) -> list[str]:
    """Return the comparison of the predicted run, and the proposal."""
    names, grade, proposal = list(mixtures.domains), mixtures.grade, mixtures.proposal
    width = max(len("mean of the sets"), *map(len, mixtures.laws))
    lines = [f"predicted before it was trained: {_blend_text(names, grade.parts)}",
             f"  {'set':<{width}}  {f'predicted ({LEVEL:.0%} interval)':<27}  measured   error  inside"]
    for name, expected in grade.predicted.items():
        loss = grade.measured[name]
        lines.append(f"  {name:<{width}}  {expected!s:<27}  {loss:>8.4f}  {100 * (expected.loss / loss - 1):>+5.1f}%  "
                     f"{'yes' if expected.low <= loss <= expected.high else 'NO'}")
    intervals = ", ".join(f"{name} {low:.3f} to {high:.3f}"
                          for name, low, high in zip(names, proposal.low, proposal.high, strict=True))
    lines += [f"proposed: {_blend_text(names, proposal.parts)} ({LEVEL:.0%} intervals: {intervals})",
              f"  {'set':<{width}}  predicted ({LEVEL:.0%} interval)"]
    lines += [f"  {name:<{width}}  {expected}" for name, expected in proposal.losses.items()]
    words = ", ".join(f"{part:g}, {json.dumps(prefix)}"
                      for part, prefix in zip(proposal.parts, mixtures.domains.values(), strict=True))
    return [*lines, f"  {'mean of the sets':<{width}}  {proposal.mean}", f"train_data: [{words}]"]


def _blend_text(names: Sequence[str], parts: Sequence[float]) -> str:
    return ", ".join(f"{name} {part:.3g}" for name, part in zip(names, parts, strict=True))
