"""A run of a model with experts and buffers from published weights, and all that reads its checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.export_hf import consolidate, export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.config.flags.arguments import RunArguments
from pretrain.data.run_data import open_run_data
from pretrain.errors import ConfigError
from pretrain.extensions.universal.write_universal import convert, export_trainer, export_universal
from pretrain.monitor.read_run_folder import read_metrics
from tests.support.cases import config
from tests.support.conversion_faults import run_tool
from tests.support.launch import train_ranks
from tests.support.wrapped_models import WRAPPED_MODELS, published

BATCH, SEQ_LENGTH = 4, 32
MODEL = {**WRAPPED_MODELS["deepseek_v3"], "vocab_size": 258}  # tokens of the byte tokenizer


@pytest.fixture(scope="module")
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps on one rank, in `run`, from the published weights in `hub`."""
    folder = tmp_path_factory.mktemp("general_weights")
    published(MODEL, folder / "hub")
    (folder / "ds.json").write_text(json.dumps(config(1, micro=BATCH, accumulation=1)))
    words = {"deepspeed_config": "ds.json", "init_from": folder / "hub", "train_data": corpus, "split": "1,0,0",
             "seq_length": SEQ_LENGTH, "train_steps": 2, "save_interval": 1, "save": "run", "log_interval": 1,
             "tokenizer": "bytes"}
    done = train_ranks(1, [f"--{name}={value}" for name, value in words.items()], folder)
    assert [rank.returncode for rank in done] == [0], done[0].stdout
    return folder


def checkpoint(run: Path, step: int = 2) -> Path:
    return run / "run" / "checkpoints" / f"global_step{step}"


def first_rows(corpus: str) -> torch.Tensor:
    args = RunArguments(train_data=corpus, split="1,0,0", seq_length=SEQ_LENGTH)
    dataset = open_run_data(args.data, seq_length=SEQ_LENGTH, seed=args.seed, tokenizer=None,
                            vocab_size=258).datasets["train"]
    return torch.tensor(dataset.samples(range(BATCH)).astype("int64"))


def test_the_first_loss_is_that_of_transformers(run: Path, corpus: str) -> None:
    rows = first_rows(corpus)
    theirs = AutoModelForCausalLM.from_pretrained(run / "hub", dtype=torch.float32).train()
    with torch.no_grad():
        expected = float(theirs(input_ids=rows, labels=rows).loss)
    losses = [row["loss"] for row in read_metrics(run / "run") if "loss" in row]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(expected, rel=1e-5)


def test_exports_averages_and_comparisons(run: Path, tmp_path: Path) -> None:
    expected = load_file(run / "hub" / "model.safetensors")
    buffers = {name: tensor for name, tensor in expected.items() if "e_score_correction_bias" in name}
    consolidate(plan_export(run / "run", tmp_path / "consolidated", dtype="fp32", with_tokenizer=False))
    done = run_tool("average", run / "run", "--steps", "1,2", "--output", tmp_path / "average")
    assert done.returncode == 0, done.stderr
    export_hf(plan_export(tmp_path / "average", tmp_path / "exported", dtype="fp32", tokenizer="bytes"))
    for name in ("consolidated", "exported"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        assert len(buffers) == 2
        assert all(torch.allclose(found[name], buffer, rtol=1e-6) for name, buffer in buffers.items())
    first, second = (CheckpointReader(checkpoint(run, step)) for step in (1, 2))
    mean = CheckpointReader(tmp_path / "average" / "checkpoints" / "global_step0")
    assert all(torch.allclose(mean.tensor(name, "fp32"), (first.tensor(name, "fp32") + second.tensor(name, "fp32")) / 2)
               for name in mean.shapes)
    assert diff(checkpoint(run), checkpoint(run)) == []
    convert(checkpoint(run), tmp_path / "universal" / "global_step2")
    saved = torch.load(tmp_path / "universal" / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
    assert saved["buffers"].keys() == second.buffers().keys()
    write: Any
    for write in (export_universal, export_trainer):  # DeepSpeed would lose the buffers
        with pytest.raises(ConfigError, match="e_score_correction_bias: this buffer of the model has other values"):
            write(plan_export(run / "run", tmp_path / "states"))
        assert not (tmp_path / "states").exists()


def test_generation_and_evaluation_are_those_of_the_export(run: Path, corpus: str, tmp_path: Path) -> None:
    export_hf(plan_export(run / "run", tmp_path / "exported", dtype="fp32"))
    texts, losses = [], []
    for source in (run / "run", tmp_path / "exported"):
        words = ("--prompt", "abc", "--max_new_tokens", "8", "--dtype", "fp32", "--temperature", "0")
        done = run_tool("generate", source, *words)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
        done = run_tool("evaluate", source, "--data", corpus, "--max_samples", "4", "--seq_length", str(SEQ_LENGTH),
                        "--dtype", "fp32", "--json", tmp_path / "scores.json")
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((tmp_path / "scores.json").read_text())["data"][0]["loss"])
    assert texts[0] == texts[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
