"""Train some steps of a run again: write flags, JSON, model and order into a folder, and launch the ranks."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.active_extensions import extensions
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.config.auto_values import NVME_PATH_VARIABLE
from pretrain.config.flags.arguments import FLAGS
from pretrain.distributed.process import PROGRAM
from pretrain.errors import ConfigError, listed, printable
from pretrain.extensions.replay.examine_step import RECOMPUTATION, Replay, read_replay
from pretrain.extensions.replay.extension import Replay as Flags
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.target import Target
from pretrain.model.own_models import is_model_code
from pretrain.monitor.read_run_folder import read_events
from pretrain.monitor.repeatable import OWN_CODE, hosts_of, repeated_config, repeated_flags, repeated_variables

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
class Layout:
    """How to launch a replay, where this differs from the run."""

    deepspeed_config: Path | None = None
    ranks: int | None = None
    hostfile: Path | None = None
    is_here: bool = False  # --num_accelerators was given: all ranks are on this host
    more: Mapping[str, str] = field(default_factory=dict)  # flags of own code: --dataset_module, --model_code

    @property
    def is_other(self) -> bool:
        """Whether ranks compute other parts of the step than in the run."""
        return self.deepspeed_config is not None or self.ranks is not None


def replay_flags(target: Target, layout: Layout, order: ReplayOrder) -> dict[str, Any]:
    """Return the flags of the replay. Raises ConfigError if they name own code that the user has not named."""
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
