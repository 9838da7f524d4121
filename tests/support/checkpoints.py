"""Real checkpoints of two small runs of train.py, created once for all tests that only read or copy them."""

import json
import shutil
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints
from pretrain.checkpoint.format.verify import find_damage
from tests.support.cases import config, flags
from tests.support.launch import ROOT, run_ranks

STEPS = 3
LAYOUTS = {"zero1": config(1, precision="bf16", micro=2), "pipeline2": config(1, precision="bf16", micro=2, stages=2)}
_made: dict[str, Path] = {}


def real_run(layout: str, corpus: str, factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on 2 ranks with a checkpoint of each of `STEPS` steps. Tests must not change it."""
    if layout not in _made:
        folder = factory.mktemp(layout)
        (folder / "ds.json").write_text(json.dumps(LAYOUTS[layout]))
        values = {**flags(corpus, steps=STEPS), "deepspeed_config": "ds.json", "save": "run",
                  "save_interval": 1, "eval_interval": 1}
        done = run_ranks([str(ROOT / "pretrain" / "train.py"), *(f"--{key}={value}" for key, value in values.items())],
                         2, cwd=folder, timeout=900)
        assert all(process.returncode == 0 for process in done), [process.stdout[-3000:] for process in done]
        _made[layout] = folder / "run"
    return _made[layout]


def copy_checkpoints(run: Path, to: Path) -> Path:
    """Copy the run's checkpoints to the folder `to`, where a test may damage them."""
    return Path(shutil.copytree(run / "checkpoints", to, symlinks=True))


def newest_verified(checkpoints: Path) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint in which all file hashes match. A starting run chooses the same checkpoint."""
    for folder, manifest in complete_checkpoints(checkpoints)[0]:
        if not find_damage(folder, manifest):
            return folder, manifest
    return None
