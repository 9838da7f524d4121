"""torchrun, and `deepspeed --module`: both start the module pretrain.train; torchrun's report follows a rejection."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import LIMIT_S, ROOT, free_port
from tests.test_train import losses

_SCRIPTS = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port={port}", "-m"],
    "deepspeed": [str(_SCRIPTS / "deepspeed"), "--num_accelerators=2", "--master_port={port}", "--module"],
}


def start(launcher: str, run: Path, corpus: str, **others: str) -> subprocess.CompletedProcess[str]:
    flags = {"deepspeed_config": str(ROOT / "ds_configs" / "zero1_bf16.json"), "model": "tiny", "train_data": corpus,
             "model_overrides": "vocab_size=256,n_layer=2,n_embd=32", "seq_length": "32", "micro_batch_size": "2",
             "gradient_accumulation_steps": "2", "split": "80,20,0", "train_steps": "2", "eval_steps": "1",
             "log_interval": "1", "save": str(run), **others}
    command = [*(word.format(port=free_port()) for word in LAUNCHERS[launcher]), "pretrain.train"]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
               "PATH": os.pathsep.join([str(_SCRIPTS), os.environ["PATH"]])}
    return subprocess.run([*command, *(f"--{name}={value}" for name, value in flags.items())], env=environ, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, cwd=run.parent)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_module_trains_on_two_ranks(launcher: str, corpus: str, tmp_path: Path) -> None:
    done = start(launcher, tmp_path / "run", corpus)
    assert done.returncode == 0, done.stdout
    assert "2 data-parallel" in done.stdout
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_torchruns_own_report_follows_the_line_that_names_a_wrong_setting(
        launcher: str, corpus: str, tmp_path: Path) -> None:
    done = start(launcher, tmp_path / "run", corpus, seq_length="0")
    assert done.returncode != 0
    line = "ds-pretrain: error: --seq_length: found 0; expected at least 1."
    assert done.stdout.count(line) == 1
    assert bool(done.stdout.partition(line)[2].strip()) == (launcher == "torchrun"), done.stdout
