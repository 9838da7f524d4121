"""Start runs on the GPUs of this machine, and read and compare their results.

These may be the GPUs of tools/dry_gpu, whose kernels compute nothing: then no values are compared, and all else is.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.monitor.read_run_folder import read_rows
from tests.support import layouts, tensors
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


def kernels_compute() -> bool:
    """Return whether the kernels of this machine's GPUs compute anything; tools/dry_gpu/src/device.c has the name."""
    return not torch.cuda.get_device_name().endswith("(dry)")


def relative_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two lists of losses; 0 if nothing computes them."""
    return layouts.relative_difference(found, expected) if kernels_compute() else 0.0


def relative_error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    """Return |mine - exact| / |exact|; 0 if nothing computes them."""
    return tensors.relative_error(mine, exact) if kernels_compute() else 0.0


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
    modules = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # also those of a dry GPU
    done = subprocess.run([*launcher, *words], cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800,
                          env={**os.environ, "PATH": scripts, "PYTHONPATH": modules, **environ})
    assert done.returncode == 0, done.stdout[-6000:]
    return Run(folder, done.stdout)
