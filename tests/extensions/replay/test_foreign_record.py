"""A replay of a run folder that others wrote: see tests/foreign_files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.distributed.process import PROGRAM
from tests.foreign_files.sandbox import Tree
from tests.foreign_files.test_foreign_files import environ_of, make, settings_of
from tests.support.launch import ROOT


@pytest.mark.slow
def test_a_replay_does_not_act_on_its_record(tmp_path: Path) -> None:
    """The ranks of the replay are in the sandbox, too. The record names a folder with modules, and libraries."""
    world = make(tmp_path / "world")
    run, traps = world / "run", world / "victim/traps"
    traps.mkdir()
    for name in ("json", "torch", "numpy", "pretrain", "sitecustomize", "deepspeed"):
        (traps / f"{name}.py").write_text(f"import pathlib; pathlib.Path({str(traps)!r}, 'executed').touch()\n")
    record = json.loads((run / "run.json").read_text())
    record[0]["command"]["directory"] = str(traps)
    record[0]["environment"] |= {"LD_PRELOAD": str(traps / "x.so"), "TORCH_EXTENSIONS_DIR": str(traps),
                                 "DS_ACCELERATOR": "cpu", "TRITON_CACHE_DIR": str(traps), "OMP_NUM_THREADS": "1"}
    record[0]["given_deepspeed_config"] |= {"csv_monitor": {"enabled": True, "output_path": str(traps)}}
    (run / "run.json").write_text(json.dumps(record))
    before = Tree(world / "victim", world / "home", world / "own", world / "here")
    settings = settings_of(world)
    settings["programs"] += [sys.executable, str(Path(sys.executable).resolve())]
    done = subprocess.run([sys.executable, PROGRAM, "replay", f"{run}@2", "--output", str(world / "out/replay")],
                          cwd=world / "here", capture_output=True, text=True,
                          env={**environ_of(world, settings), "PYTHONPATH": str(ROOT / "tests/foreign_files/site")})
    (run / "run.json").write_bytes((world / "own/run.json").read_bytes())
    assert done.returncode == 0, done.stderr
    assert "reproduc" in done.stdout
    assert not (world / "log").exists(), (world / "log").read_text()
    assert before.changes() == []
