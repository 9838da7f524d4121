"""RunFolder: rank 0 appends to the files run.json, events.jsonl and metrics.jsonl of a run folder."""

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretrain import __version__
from pretrain.config.validate import Plan
from pretrain.monitor.read_run_folder import read_starts

_PATHS = ("tokenizer", "train_data", "valid_data", "test_data")  # flags that tools read later, in any working directory
_PACKAGES = ("torch", "deepspeed", "transformers", "sentencepiece")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of the packages that a result depends on."""
    found = {"python": platform.python_version(), "ds-pretrain": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _absolute(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path else path


def run_record(plan: Plan, hosts: list[str]) -> dict[str, Any]:
    """Return the record of one start: everything that the result of the run depends on."""
    return {
        "time": time.time(),
        "flags": {**asdict(plan.args), **{name: _absolute(getattr(plan.args, name)) for name in _PATHS}},
        "deepspeed_config": plan.ds_config,
        "origin": asdict(plan.origin) if plan.origin else None,
        "model_config": plan.model.hf_config, "num_parameters": plan.model.num_parameters(),
        "train_steps": plan.train_steps,
        "layout": {"world_size": plan.layout.world_size, "data_parallel_size": plan.layout.data_parallel_size,
                   "pipeline_stages": plan.layout.pipeline_stages, "zero_stage": plan.layout.zero_stage,
                   "precision": plan.layout.precision},
        "batch": {"micro_batch_size": plan.layout.micro_batch_size,
                  "gradient_accumulation_steps": plan.layout.gradient_accumulation_steps,
                  "global_batch_size": plan.layout.global_batch_size},
        "data": {name: dataset.fingerprint for name, dataset in plan.datasets.items()},
        "tokenizer": plan.tokenizer.fingerprint if plan.tokenizer else None,
        "versions": versions(), "git_commit": _git_commit(), "hosts": hosts,
    }


class RunFolder:
    """Appends to the files of a run folder. It is active on rank 0 only; on other ranks it does nothing.

    `before_write` is called before each write: it ends the process if this run no longer owns the folder.
    """

    def __init__(self, path: Path, *, active: bool, before_write: Callable[[], None] = lambda: None) -> None:
        self.path, self._active, self._before_write = path, active, before_write
        if active:
            path.mkdir(parents=True, exist_ok=True)

    def start(self, record: dict[str, Any]) -> None:
        """Append a record to run.json, the list of all starts."""
        if not self._active:
            return
        self._before_write()
        path = self.path / "run.json"
        starts = read_starts(self.path) if path.is_file() else []
        temporary = path.with_name(".tmp-run.json")
        temporary.write_text(json.dumps([*starts, record], indent=1, default=str), encoding="utf-8")
        os.replace(temporary, path)

    def event(self, kind: str, *, step: int, reason: str = "", **details: Any) -> None:
        """Append a row to events.jsonl. `kind` is start, resume, save, skip, stop ..."""
        self._append("events.jsonl", {"time": time.time(), "event": kind, "step": step, "reason": reason, **details})

    def metrics(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl. NaN and infinity, which JSON does not have, become null."""
        self._append("metrics.jsonl", {key: None if isinstance(value, float) and not math.isfinite(value) else value
                                       for key, value in row.items()})

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if not self._active:
            return
        self._before_write()
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # for example a full disk: training continues
            print(f"warning: {self.path / name}: {error.strerror}", flush=True)
