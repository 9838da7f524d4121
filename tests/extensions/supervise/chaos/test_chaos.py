"""Real runs: random faults at random moments change no loss and no weight, and lose no checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.supervise.chaos.faults import KINDS
from tests.extensions.supervise.chaos.results import state_hash
from tests.support.launch import LIMIT_S, ROOT, free_port
from tests.support.supervised import kill_tree

DS_PRETRAIN = ["ds-pretrain", "--num_accelerators", "2"]


def run_chaos(folder: Path, corpus: str, faults: list[str], *, launcher: list[str] = DS_PRETRAIN, config: str,
              timeout: float, **train: Any) -> dict[str, Any]:
    """Run `python -m tests.extensions.supervise.chaos` on 2 ranks. Return chaos.json, with the output as "output"."""
    values = {"model": "tiny", "model_overrides": "vocab_size=256,n_layer=2,n_embd=64,resid_pdrop=0.1",
              "train_data": corpus, "seq_length": 64, "split": "100,0,0", "micro_batch_size": 2, "learning_rate": 1e-3,
              "deepspeed_config": ROOT / "ds_configs" / f"{config}.json", "save_interval": 4, "keep_checkpoints": 3,
              "async_save": True, "save": folder / "run", **train}
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
               "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.extensions.supervise.chaos", *faults, "--stall_s", str(LIMIT_S), "--",
               *launcher, *(f"--{name}={value}" for name, value in values.items())]
    with open(folder / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder, start_new_session=True)
        try:
            code = process.wait(timeout)
        finally:
            kill_tree(process)
    output = (folder / "log").read_text()
    print(*(line for line in output.splitlines() if line.startswith("chaos: ")), sep="\n")
    result: dict[str, Any] = json.loads((folder / "run" / "chaos.json").read_text())
    assert code == (0 if result["ok"] else 1)
    assert result["problems"] == [], output[-6000:]
    assert result["total"]["faults"] == result["total"]["recovered"] == int(faults[1])
    return result


def test_a_run_with_each_kind_of_fault_equals_the_run_without(corpus: str, tmp_path: Path) -> None:
    result = run_chaos(tmp_path, corpus, ["--faults", "12", "--seed", "1"], config="pipeline2_zero1_bf16",
                       gradient_accumulation_steps=8, train_steps=60, timeout=3 * LIMIT_S)
    assert {kind for kind, row in result["kinds"].items() if row["faults"]} == KINDS.keys() - {"hang"}
    run, reference = result["hashes"]
    checkpoints = tmp_path / "run-reference" / "checkpoints"
    assert run == reference == state_hash(checkpoints / "global_step60")
    assert run != state_hash(checkpoints / "global_step56")  # the hash sees 4 updates


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "launcher", "config"), [
    ("100", "ds-pretrain", "zero3_bf16"), ("13", "deepspeed", "pipeline2_zero1_bf16")])
def test_a_run_with_many_faults_equals_the_run_without(faults: str, launcher: str, config: str, corpus: str,
                                                       tmp_path: Path) -> None:
    """Also hangs, which the watchdog ends."""
    deepspeed = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()),
                 str(ROOT / "pretrain" / "train.py")]
    result = run_chaos(tmp_path, corpus, ["--faults", faults, "--seed", "7"],
                       launcher=DS_PRETRAIN if launcher == "ds-pretrain" else deepspeed, config=config,
                       gradient_accumulation_steps=32, train_steps=10 * int(faults), step_timeout=20, save_timeout=20,
                       timeout=20 * LIMIT_S)
    assert {kind for kind, row in result["kinds"].items() if row["faults"]} == KINDS.keys()
