"""Examine a step: train up to it again, compare with the record, repeat if needed, and return the result.

Flags, JSON, model and order of a replay are written into a folder, and its ranks are launched. This module imports no
torch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.active_extensions import extensions
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.config.auto_values import NVME_PATH_VARIABLE
from pretrain.config.flags.arguments import FLAGS
from pretrain.distributed.process import PROGRAM
from pretrain.errors import ConfigError, counted, listed, named, printable
from pretrain.extension import BUILT_IN
from pretrain.extensions.replay.compare import Comparison, compare, compare_loosely
from pretrain.extensions.replay.extension import Replay as Flags
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.record_files import FLIGHT, Header, RankRecord, read_start
from pretrain.extensions.replay.result import CAUSES, SURE, Result, find_cause
from pretrain.extensions.replay.target import Target
from pretrain.model.own_models import is_model_code
from pretrain.monitor.read_run_folder import read_events, read_starts
from pretrain.monitor.repeatable import (
    OWN_CODE,
    check_repeatable,
    hosts_of,
    repeated_config,
    repeated_flags,
    repeated_variables,
)

RECOMPUTATION = "recomputation"  # event of a micro-batch that another rank has computed with another result
_FROM_METRICS = ("loss", "grad_norm", "lr", "loss_scale")
_TOLERANCES = {"fp32": 2e-5, "bf16": 2e-3, "fp16": 2e-3}  # largest relative difference of losses in another layout
_CHANGED_DATA = re.compile(r"rejected: --train_data .* that .* was trained on \(")  # checkpoint/load/same_data.py
_SOFTWARE = ("python", "torch", "deepspeed", "transformers")
# Flags that neither change the steps nor belong to a replay, as those of other extensions: it measures, evaluates,
# saves and reports nothing. The guard must not end or roll back a replay whose steps are bad.
_CHANGED: dict[str, Any] = {
    "eval_interval": 0, "save_interval": 0, "log_interval": 1, "spike_policy": "warn", "max_bad_steps": 10**9,
    "replica_check_interval": 0, "early_stopping_patience": 0, "flight_interval": 1, "flight_steps": 10**6}
_REMOVED = ("trackio", "note", "async_save", "save_busy",
            "keep_checkpoints", "keep_every", "keep_best", "exit_step", "exit_after_minutes",
            "early_stopping_min_delta", "recompute_interval")
_OF_LAYOUT = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "precision", "nvme_path")
_LINES_OF_LOG = 12


@dataclass(frozen=True)
class Replay:
    """A finished replay."""

    run: Path  # its run folder
    recorded: dict[int, RankRecord]  # by rank


@dataclass(frozen=True)
class Answer:
    """The result, and what it is based on."""

    result: Result
    notes: list[str]
    replays: list[Replay]
    run: Comparison | None  # None: nothing was trained


Train = Callable[[int, ReplayOrder], Replay]
"""Train a replay with this number, from 1, and return it. Raises ConfigError."""


def read_replay(run: Path) -> Replay:
    """Return the recording in the run folder of a replay. Raises ConfigError if there is none."""
    starts = sorted((run / FLIGHT).glob("start_*"), key=lambda path: int(path.name[6:]))
    recorded = read_start(starts[-1]) if starts else {}
    if not recorded:
        raise ConfigError(str(run), problem="the replay has recorded no step", remedy="see the log next to it")
    return Replay(run, recorded)


def order_of(target: Target) -> ReplayOrder:
    """Return what the ranks of a replay do."""
    vetoed = sorted({step for record in target.recorded.values() for step, row in record.rows.items()
                     if row.get("skipped") == "veto" and target.first_step < step <= target.step})
    return ReplayOrder(target.step, target.consumed_samples, vetoed)


def examine(target: Target, train: Train, *, repeats: int, is_other_layout: bool = False) -> Answer:
    """Replay a step, once more if the first replay differs from the run, and return the answer. Raises ConfigError."""
    notes = list(target.notes)
    if target.data_problem and not target.start["flags"].get("allow_other_data"):
        return _other_data(target.data_problem, notes)
    notes += [target.data_problem] if target.data_problem else []
    notes += [f"the run used the extension {name} ({origin}), and the replay does not"
              for name, origin in (target.start.get("extensions") or {}).items() if origin != BUILT_IN]
    order = order_of(target)
    recorded = target.recorded or recorded_in_metrics(target)
    if not target.recorded:
        notes.append("the run has no flight record of these steps: only what metrics.jsonl has is compared (loss, "
                     "gradient norm, learning rate)")
    first = target.first_step + 1
    try:
        replays = [train(1, order)]
    except ConfigError as error:
        if _CHANGED_DATA.search(str(error)) is None:
            raise
        return _other_data(str(error), notes)  # the start of a replay also compares hashes of all bytes
    if is_other_layout:
        return _in_other_layout(target, recorded, replays[0], notes)
    run = compare(recorded, replays[0].recorded, first, target.step,
                  world_size=target.world_size if target.recorded else 0)
    notes += _not_compared(run)
    between: list[Comparison] = []
    while run.step is not None and len(replays) < repeats and not any(each.step for each in between):
        replays.append(train(len(replays) + 1, order))
        between.append(compare(replays[0].recorded, replays[-1].recorded, first, target.step))
    recomputed: list[dict[str, Any]] | None = None
    if run.step is None and _num_data_ranks(target) > 1:
        replays.append(train(len(replays) + 1, replace(order, cross_check=True)))
        recomputed = [event for event in read_events(replays[-1].run) if event["event"] == RECOMPUTATION
                      and event.get("finding") != "off"]
    found = find_cause(run, between, other_machine=machine_differences(target, replays[0]), recomputed=recomputed)
    return Answer(found, notes, replays, run)


def _other_data(problem: str, notes: list[str]) -> Answer:
    return Answer(Result("data_changed", SURE, evidence=[problem], remedy=CAUSES["data_changed"].remedy), notes, [],
                  None)


def _num_data_ranks(target: Target) -> int:
    found = target.start["layout"].get("data_parallel_size")
    return found if isinstance(found, int) else 1


def recorded_in_metrics(target: Target) -> dict[int, RankRecord]:
    """Return what metrics.jsonl has of the steps, as the record of rank 0."""
    rows = {step: {key: row[key] for key in _FROM_METRICS if isinstance(row.get(key), (int, float))}
            for step, row in target.rows.items()}
    return {0: RankRecord(Header(0, target.world_size, "", 0, target.first_step), rows)}


def _not_compared(run: Comparison) -> Iterator[str]:
    """Yield notes on steps and ranks without a record."""
    until = run.last if run.step is None else run.step
    lost = [step for step in range(run.first, until + 1) if step not in run.compared]
    if lost:
        yield (f"{counted(len(lost), 'step')} from {lost[0]} to {lost[-1]} cannot be compared: the run has no record "
               "of them (--flight_steps)")
    if run.missing_ranks:
        yield f"no record of {named('rank', run.missing_ranks)}"


def machine_differences(target: Target, replay: Replay) -> list[str]:
    """Return how versions and hardware of a replay differ from the recorded ones, a line each."""
    try:
        here = read_starts(replay.run)[-1]
    except ConfigError:
        return []
    lines = [f"{name} {here['versions'].get(name)}, recorded {then}"
             for name, then in (target.start.get("versions") or {}).items()
             if name in _SOFTWARE and isinstance(here.get("versions"), dict) and here["versions"].get(name) != then]
    devices, recorded = (_devices(start.get("hardware")) for start in (here, target.start))
    if devices and recorded and devices != recorded:
        lines.append(f"{', '.join(sorted(devices))}, recorded {', '.join(sorted(recorded))}")
    threads, before = ((start.get("environment") or {}).get("OMP_NUM_THREADS") for start in (here, target.start))
    if threads != before:
        lines.append(f"OMP_NUM_THREADS {threads}, recorded {before}")
    return lines


def _devices(hardware: Any) -> set[str]:
    """Return the names of the GPUs, or of the processors if there are none."""
    hosts = [host for host in hardware if isinstance(host, dict)] if isinstance(hardware, list) else []
    gpus = {str(gpu.get("name")) for host in hosts for gpu in host.get("gpus") or [] if isinstance(gpu, dict)}
    return gpus or {str(host.get("cpu")) for host in hosts}


def _in_other_layout(target: Target, recorded: dict[int, RankRecord], replay: Replay, notes: list[str]) -> Answer:
    """Compare with a tolerance. A difference in another layout names no rank."""
    tolerance = _TOLERANCES.get(str(target.start["layout"].get("precision")), _TOLERANCES["bf16"])
    run = compare_loosely(recorded, replay.recorded, target.first_step + 1, target.step, tolerance=tolerance)
    notes += [f"another layout than the run's: not bits are compared, but loss (to {tolerance:g}, relative), gradient "
              f"norm (to {10 * tolerance:g}) and settings", *_not_compared(run)]
    if run.step is None:
        found = find_cause(run, recomputed=())
        lines = [f"step {run.first} to {run.last}: losses, gradient norms and learning rates are equal within the "
                 "tolerance"]
        return Answer(replace(found, evidence=lines), notes, [replay], run)
    keys = run.differing[0]
    lines = [f"step {run.step}: " + "; ".join(f"{key} {run.one[0][key]} recorded, {run.other[0][key]} replayed"
                                              for key in keys)]
    kind = "settings_changed" if {"lr", "loss_scale"} & set(keys) else \
        "data_changed" if "samples" in keys else "update" if keys == ["skipped"] else "forward"
    found = Result(kind, SURE, step=run.step, stage=run.stage, evidence=lines, remedy=CAUSES[kind].remedy)
    if kind in ("forward", "update"):
        found = found.unsure("in another layout the stage and the rank cannot be told: replay it in the layout of the "
                            "run", "backward", "reduction", "update", "memory_weights", "memory_states")
    return Answer(found, notes, [replay], run)


@dataclass(frozen=True)
class Layout:
    """How to launch a replay, where this differs from the run."""

    deepspeed_config: Path | None = None
    ranks: int | None = None
    hostfile: Path | None = None
    is_here: bool = False  # --num_accelerators was given: all ranks are on this host
    more: Mapping[str, str] = field(default_factory=dict)  # flags of own code: --dataset_module, --model_code

    @property
    def is_other(self) -> bool:
        """True if ranks compute other parts of the step than in the run."""
        return self.deepspeed_config is not None or self.ranks is not None


def replay_flags(target: Target, layout: Layout, order: ReplayOrder) -> dict[str, Any]:
    """Return the flags of the replay. Raises ConfigError if they name own code that the user has not named."""
    check_repeatable(target.start)
    removed = {*_REMOVED, *(name for each in extensions() if each.settings is not Flags for name in each.flags)}
    flags = {name: value for name, value in repeated_flags(target.start).items() if name not in removed}
    flags |= {name: value for name, value in _CHANGED.items() if name in FLAGS}
    if order.cross_check:
        flags["recompute_interval"] = 1
    recorded = target.start["flags"]
    for name in OWN_CODE:
        used = recorded.get(name) or (name == "model_code" and is_model_code(str(recorded.get("model", ""))))
        if not used and name in layout.more:
            raise ConfigError(f"--{name}", problem="the run used no code of your own", remedy="leave it out")
        if used and name not in layout.more:
            raise ConfigError(f"--{name}", problem="the run used your own code, which a record alone never imports",
                              remedy=f"give --{name} {printable(str(recorded.get(name) or recorded.get('model')))}")
    flags.pop("resume_from", None)
    if target.checkpoint is not None:
        flags.pop("init_from", None)
        flags["resume_from"] = str(target.checkpoint.absolute())
    else:
        flags.pop("override", None)
    if layout.is_other:
        for name in _OF_LAYOUT:
            flags.pop(name, None)
        flags["global_batch_size"] = target.start.get("batch", {}).get("global_batch_size")
    return {**flags, **layout.more}


def replay_config(target: Target, layout: Layout) -> dict[str, Any]:
    """Return the DeepSpeed JSON of the run, without monitors. On another number of ranks, the steps are as large."""
    kept = repeated_config(target.start)
    if layout.is_other:
        kept.pop("gradient_accumulation_steps", None)
        kept["train_batch_size"] = target.start.get("batch", {}).get("global_batch_size", "auto")
    return kept


def prepare(folder: Path, target: Target, layout: Layout, order: ReplayOrder) -> list[str]:
    """Write the files of a replay into its folder. Returns the command. Raises ConfigError."""
    folder = folder.absolute()
    hosts = hosts_of(target.start)
    if layout.hostfile is None and layout.ranks is None and not layout.is_here and len(hosts) > 1:
        raise ConfigError("--hostfile", problem=f"the run trained on {len(hosts)} hosts ({printable(listed(hosts))}); "
                          "a record alone makes no program connect to hosts",
                          remedy="give --hostfile with a file that lists them, or --num_accelerators")
    run, flags = folder / "run", replay_flags(target, layout, order)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        run.mkdir(parents=True)
        files = {"run.yaml": flags, "config.json": target.start["model_config"],
                 # the operators that the run's trials chose are read from here; a new trial may choose others
                 "run/run.json": [target.start]}
        if layout.deepspeed_config is None:
            files["deepspeed.json"] = replay_config(target, layout)
        for name, values in files.items():
            write_atomically(folder / name, json.dumps(values, indent=1) + "\n")
        (run / "events.jsonl").touch()  # only an existing run may lie inside of another one
        order.write(folder / "order.json")
    except OSError as error:
        raise ConfigError(f"--output {folder.parent}", problem=f"it cannot be written ({error.strerror})",
                          remedy="name another folder") from None
    where = ["--hostfile", str(layout.hostfile.absolute())] if layout.hostfile is not None else \
        ["--num_accelerators", str(layout.ranks or target.world_size)]
    config = layout.deepspeed_config or folder / "deepspeed.json"
    return [*where, "--config", str(folder / "run.yaml"), "--deepspeed_config", str(config.absolute()),
            "--model", str(folder / "config.json"), "--save", str(run), "--replay", str(folder / "order.json")]


def train_again(folder: Path, target: Target, layout: Layout, order: ReplayOrder) -> Replay:
    """Train the steps of a target again, and return the recording. Raises ConfigError."""
    command = prepare(folder, target, layout, order)
    log = folder / "log"
    with open(log, "w", encoding="utf-8") as output:
        code = subprocess.run([sys.executable, PROGRAM, *command], env=_environment(target, folder), stdout=output,
                              stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0 and not any(row["event"] == RECOMPUTATION for row in read_events(folder / "run")):
        raise _failure(log, code)
    return read_replay(folder / "run")


def _environment(target: Target, folder: Path) -> dict[str, str]:
    """Return the variables of this process and those of the run that change results, such as OMP_NUM_THREADS.

    States on NVMe are in the folder of the replay, unless the user names another one.
    """
    return {NVME_PATH_VARIABLE: str(folder.absolute() / "nvme"), **os.environ, **repeated_variables(target.start),
            "DS_PRETRAIN_NEXT": "0"}


def _failure(log: Path, code: int) -> ConfigError:
    """Return the error of a replay that failed: its own line, if it has one."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    own = [line.partition("error: ")[2] for line in lines if "ds-pretrain: error: " in line]
    if own:
        return ConfigError.from_line(f"the replay was rejected: {printable(own[-1])}")
    return ConfigError(str(log), problem=f"the replay ended with exit code {code}: "
                       f"{printable(' | '.join(_last(lines)))}", remedy="read this log")


def _last(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.strip()][-_LINES_OF_LOG:][-2:]
