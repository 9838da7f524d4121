"""Rank 0 alone rejects a start, under a launcher that ends no other rank: all ranks end, and one of them says why."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pretrain.distributed.process import free_port
from pretrain.errors import REJECTED
from tests.support.cases import config, flags
from tests.support.launch import LIMIT_S, ROOT
from tools.benchmarks.pretended_run import pretend

RANKS = 3


def start_ranks(folder: Path, *arguments: str, of_last: Sequence[str] = ()) -> list[tuple[int, str]]:
    """Run train.py as `srun` does without --kill-on-bad-exit. Return exit code and stderr of each rank.

    `of_last`: further arguments of the last rank.
    """
    usual = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_JOB_ID": "7",
             "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(RANKS), "SLURM_STEP_TASKS_PER_NODE": str(RANKS)}
    ranks = [subprocess.Popen([sys.executable, str(ROOT / "pretrain" / "train.py"), *arguments,
                               *(of_last if rank == RANKS - 1 else ())], cwd=folder, text=True,
                              env={**usual, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(RANKS)]
    try:
        texts = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


@pytest.mark.parametrize("rejected_by", ["rank 0", "all ranks", "the last rank"])
def test_all_ranks_end_if_the_run_is_rejected(rejected_by: str, tmp_path: Path) -> None:
    """Only rank 0 asks for the sizes of a checkpoint's files; all ranks read the flags."""
    run = pretend(tmp_path, 8)
    steps = "50" if rejected_by == "the last rank" else "-50"
    if rejected_by == "rank 0":
        next(run.checkpoints.glob("global_step*/rng_state_rank_00005.pt")).unlink()
        steps = "50"
    found = start_ranks(tmp_path, "--deepspeed_config=deepspeed.json", "--model=tiny", "--train_data=corpus",
                        "--model_overrides=vocab_size=256", "--save=run", "--seq_length=64", "--split=1",
                        f"--train_steps={steps}",
                        of_last=["--train_data=nowhere"] if rejected_by == "the last rank" else [])
    assert [code for code, _ in found] == [REJECTED] * RANKS, found
    lines = [line for _, text in found for line in text.splitlines() if "error:" in line]
    assert len(lines) == 1, "each host prints the error once"
    if rejected_by == "the last rank":
        assert f"error: rejected by rank 2 ({os.uname().nodename}): nowhere.idx: there is no such file" in lines[0]
    else:
        assert ("rng_state_rank_00005.pt" if rejected_by == "rank 0" else "--train_steps") in lines[0]


def test_operators_that_cannot_be_compiled_reject_the_run(corpus: str, tmp_path: Path) -> None:
    """DeepSpeed raises a RuntimeError of its own from the error of the operator's cache."""
    values = config(1, precision="bf16", accumulation=1)
    values["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    words = flags(corpus, layers=1, steps=1, deepspeed_config=tmp_path / "ds.json", save=tmp_path / "run")
    command = [sys.executable, str(ROOT / "pretrain" / "train.py"), *(f"--{name}={words[name]}" for name in words)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "TORCH_EXTENSIONS_DIR": "/proc/1"},
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == REJECTED, done.stderr
    assert done.stderr.count("ds-pretrain: error: /proc/1: compiled operators cannot be written here") == 1
    assert "Traceback" not in done.stderr
