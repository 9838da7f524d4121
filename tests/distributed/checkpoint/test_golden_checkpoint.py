"""A checkpoint of an earlier version can still be read. Training resumes in the same layout and in another layout.

tests/golden/checkpoint.tar.xz: step 3 of the run below (version 0.1.0 of November 2026, ZeRO-2 in bf16 on 2 ranks);
tests/golden/checkpoint_losses.txt: `step loss` of the following steps of the same run.
"""

import json
import shutil
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.verify import find_damage
from tests.support.launch import ROOT, tails, train_ranks

GOLDEN = ROOT / "tests" / "golden"
MODEL = "vocab_size=256,n_layer=1,n_embd=16,n_head=2,n_positions=64"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with the recorded checkpoint."""
    shutil.unpack_archive(GOLDEN / "checkpoint.tar.xz", tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def test_the_manifest_is_written_back_byte_for_byte(run: Path) -> None:
    folder = run / "checkpoints" / "global_step3"
    text = (folder / "manifest.json").read_text()
    manifest = Manifest.from_json(text)
    assert manifest.to_json() == text
    assert find_damage(folder, manifest) == []


@pytest.mark.parametrize(("ranks", "config", "micro_batch_size"), [(2, "zero2_bf16", 2), (1, "zero0_bf16", 4)])
def test_run_resumes(run: Path, corpus: str, tmp_path: Path, ranks: int, config: str, micro_batch_size: int) -> None:
    flags = {"deepspeed_config": ROOT / "ds_configs" / f"{config}.json", "model": "tiny", "model_overrides": MODEL,
             "train_data": corpus, "split": "80,20,0", "seq_length": 32, "micro_batch_size": micro_batch_size,
             "gradient_accumulation_steps": 1, "learning_rate": "1e-2", "train_steps": 6, "log_interval": 1,
             "eval_interval": 0, "eval_steps": 1, "save": run, "resume": "required"}
    done = train_ranks(ranks, [f"--{name}={value}" for name, value in flags.items()], tmp_path)
    assert [rank.returncode for rank in done] == [0] * ranks, tails(tmp_path, ranks)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["loss"] for row in rows if "loss" in row}
    lines = (GOLDEN / "checkpoint_losses.txt").read_text().splitlines()
    expected = {int(step): float(loss) for step, loss in (line.split() for line in lines)}
    assert found == pytest.approx(expected, rel=5e-4)
