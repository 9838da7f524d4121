"""A run that is moved here from Megatron-LM trains real ranks on the samples that follow."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.commands import COMMANDS
from pretrain.data.token_files.writer import IndexedWriter
from tests.extensions.megatron_order.reference_order import reference_blend
from tests.support.cases import config
from tests.support.launch import PROGRAM, ROOT, WORKERS, run_ranks

SEQ_LENGTH, BATCH, FIRST, STEPS, SEED = 16, 8, 76, 4, 99
WEIGHTS = [0.9, 0.2]


def write(prefix: Path, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    documents = [random.integers(1, 250, length) for length in random.integers(0, 60, 60)]
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finalize()
    return [document.tolist() for document in documents]


def trained_samples(folder: Path, step: int) -> list[list[int]]:
    """Return the samples of a step in the order of the global batch: micro-batch 0 of rank 0, then of rank 1, ..."""
    ranks: list[Any] = [torch.load(folder / f"{step}_{rank}.pt") for rank in range(2)]
    return [row for number in range(len(ranks[0])) for rank in ranks
            for row in torch.cat([rank[number][0], rank[number][1][0][:, -1:]], dim=1).tolist()]


def test_a_moved_run_continues_with_the_samples_of_megatron(tmp_path: Path) -> None:
    """The run has consumed 76 samples of a blend elsewhere, reads a source twice, and is resumed in another layout."""
    documents = [write(tmp_path / name, seed) for seed, name in enumerate("ab")]
    flags = {"model": "tiny", "model_overrides": "vocab_size=256,n_layer=2,n_embd=64", "split": "8,2,0",
             "seq_length": SEQ_LENGTH, "train_steps": STEPS, "save": tmp_path / "run", "seed": SEED,
             "sample_order": "megatron", "first_sample": FIRST, "eval_interval": 0, "log_interval": 1}
    data = ["--train_data", str(WEIGHTS[0]), f"{tmp_path}/a", str(WEIGHTS[1]), f"{tmp_path}/b"]
    (tmp_path / "batches").mkdir()
    for micro, exit_step in ((2, 2), (4, STEPS)):
        (tmp_path / f"{micro}.json").write_text(json.dumps(config(1, micro=micro, accumulation=4 // micro)))
        words = [f"--{name}={value}" for name, value in {**flags, "deepspeed_config": tmp_path / f"{micro}.json",
                                                         "exit_step": exit_step}.items()]
        done = run_ranks([str(WORKERS / "recorded_batches.py"), str(tmp_path / "batches"), *words, *data], 2,
                         cwd=tmp_path)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    training = [of_source[:48] for of_source in documents]
    epoch, read = sum(map(len, training[0])) // SEQ_LENGTH, (FIRST + STEPS * BATCH) * WEIGHTS[0] / sum(WEIGHTS)
    assert epoch < read < 1.8 * epoch, "the last epoch of the first source is shuffled apart"
    expected = reference_blend("megatron", training, WEIGHTS, SEQ_LENGTH, SEED, FIRST + STEPS * BATCH)
    for step in range(1, STEPS + 1):
        first = FIRST + (step - 1) * BATCH
        assert trained_samples(tmp_path / "batches", step) == expected[first:first + BATCH], step

    longer = [f"--{name}={value}" for name, value in {**flags, "deepspeed_config": tmp_path / "4.json",
                                                      "train_steps": 100}.items()]
    done = run_ranks([str(ROOT / "pretrain" / "train.py"), *longer, *data], 2, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [2, 2]
    assert "is part of a run of 108 samples, and this run has 876" in done[0].stdout
    if "inspect" in COMMANDS:  # of another extension
        shown = subprocess.run([sys.executable, PROGRAM, "inspect", "step", str(tmp_path / "run"), "3"],
                               capture_output=True, text=True)
        assert shown.stdout.startswith("step 3: samples 92 to 99"), shown.stderr
