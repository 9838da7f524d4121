"""Start runs on the GPUs of this machine, and read their results."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.monitor.read_run_folder import read_rows
from tests.support.launch import ROOT


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    output: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.folder / "metrics.jsonl") if "loss" in row]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def words_of(folder: Path, config: Path | str, flags: dict[str, Any]) -> list[str]:
    """Return the flags of a run that logs each step."""
    own = {"log_interval": 1, "save_interval": 0, **flags}
    return [f"--deepspeed_config={config}", f"--save={folder}", *(f"--{key}={value}" for key, value in own.items())]


def start(folder: Path, config: Path | str, flags: dict[str, Any], *, ranks: int = 1,
          program: str = "pretrain/train.py", **environ: str) -> Run:
    """Train with `flags`, and log each step. `program` runs on one rank; several ranks need the launcher.

    Raises AssertionError with the end of the output if the run fails.
    """
    words = words_of(folder, config, flags)
    launcher = [sys.executable, program] if ranks == 1 else \
        [str(Path(sys.executable).parent / "ds-pretrain"), "--num_accelerators", str(ranks)]
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run([*launcher, *words], cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800,
                          env={**os.environ, "PATH": scripts, "PYTHONPATH": str(ROOT), **environ})
    assert done.returncode == 0, done.stdout[-6000:]
    return Run(folder, done.stdout)
