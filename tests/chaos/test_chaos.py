"""A real run: random faults at random moments change no loss and no weight, and lose no checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import KINDS
from tests.chaos.results import state_hash
from tests.support.launch import LIMIT_S, ROOT
from tests.support.supervised import kill_tree


def run_chaos(folder: Path, corpus: str, flags: list[str], train: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """Run `python -m tests.chaos` on 2 ranks. Return chaos.json, with the output as "output"."""
    values = {"model": "tiny", "model_overrides": "vocab_size=256,n_layer=2,n_embd=64,resid_pdrop=0.1",
              "train_data": corpus, "seq_length": 64, "split": "100,0,0", "micro_batch_size": 2, "learning_rate": 1e-3,
              "keep_checkpoints": 3, "async_save": True, "save": folder / "run", **train}
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
               "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.chaos", *flags, "--", "ds-pretrain", "--num_accelerators", "2",
               *(f"--{name}={value}" for name, value in values.items())]
    with open(folder / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder, start_new_session=True)
        try:
            code = process.wait(timeout)
        finally:
            kill_tree(process)
    output = (folder / "log").read_text()
    print(*(line for line in output.splitlines() if line.startswith("chaos: ")), output[output.rfind("\nfault "):],
          sep="\n")
    result: dict[str, Any] = json.loads((folder / "run" / "chaos.json").read_text())
    assert code == (0 if result["ok"] else 1)
    return {**result, "output": output}


def test_a_run_with_20_faults_equals_the_run_without(corpus: str, tmp_path: Path) -> None:
    result = run_chaos(
        tmp_path, corpus, ["--faults", "20", "--seed", "1", "--stall_s", str(LIMIT_S)],
        {"deepspeed_config": ROOT / "ds_configs" / "pipeline2_zero1_bf16.json", "gradient_accumulation_steps": 8,
         "train_steps": 80, "save_interval": 4}, timeout=3 * LIMIT_S)
    assert result["problems"] == [], result["output"][-6000:]
    total = result["total"]
    assert total["faults"] == total["recovered"] == 20
    assert (result["lost"], result["wrong_steps"], result["missing_steps"]) == ([], 0, 0)
    assert {kind for kind, row in result["kinds"].items() if row["faults"]} == KINDS.keys() - {"hang"}
    run, reference = result["hashes"]
    assert run == reference
    assert run == state_hash(tmp_path / "run-reference" / "checkpoints" / "global_step80")
    assert run != state_hash(tmp_path / "run-reference" / "checkpoints" / "global_step76")  # the hash sees 4 updates


@pytest.mark.slow
def test_a_run_with_200_faults_equals_the_run_without(corpus: str, tmp_path: Path) -> None:
    """Also hangs, which the watchdog ends."""
    result = run_chaos(
        tmp_path, corpus, ["--faults", "200", "--seed", "7", "--stall_s", str(LIMIT_S)],
        {"deepspeed_config": ROOT / "ds_configs" / "zero3_bf16.json", "gradient_accumulation_steps": 32,
         "train_steps": 2000, "save_interval": 4, "step_timeout": 20}, timeout=20 * LIMIT_S)
    assert result["problems"] == [], result["output"][-6000:]
    assert result["total"]["faults"] == result["total"]["recovered"] == 200
    assert {kind for kind, row in result["kinds"].items() if row["faults"]} == KINDS.keys()
