"""The dry GPU of tools/dry_gpu. Slow tests make its environment (4.7 GB), others are skipped where it is missing."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launch import ROOT

PROGRAM = ROOT / "tools" / "dry_gpu" / "dry-gpu"
ENVIRONMENT = Path(os.environ.get("DRY_GPU_VENV", ROOT / ".venv-dry-gpu"))
LIMIT_S = 1200

DryGpu = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def dry_gpu(request: pytest.FixtureRequest) -> DryGpu:
    """Return a function that runs a command on `devices` dry GPUs, and returns its output in `stdout`."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        if "slow" not in request.config.getoption("-m").replace("not slow", ""):
            pytest.skip(f"no dry GPU: {ENVIRONMENT} is missing; tools/dry_gpu/dry-gpu --setup makes it (4.7 GB)")
        subprocess.run([PROGRAM, "--setup"], check=True)

    def run(words: list[str], *, devices: int = 1, cwd: Path = ROOT,
            **environ: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "DRY_GPU_VENV": str(ENVIRONMENT), "DRY_GPU_COUNT": str(devices),
                     "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        return subprocess.run([str(PROGRAM), *words], cwd=cwd, env=variables, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S)

    return run
