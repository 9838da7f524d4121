"""tools/evaluate.py on checkpoints of real runs and on transformers folders: losses, bytes, ranks and layouts."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pretrain.analysis.model_source import EvaluationSource, choose_partition, evaluation_dtype, evaluation_source
from pretrain.checkpoint.convert.write_weights import import_hf
from pretrain.checkpoint.load.hf_folder import check_hf_folder, find_hf_tokenizer
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.device import Device
from pretrain.distributed.world import ALONE, World
from tests.support.byte_tokenizer import EOD, write_byte_tokenizer
from tests.support.cases import flags
from tests.support.hf_models import hf_model, save_hf_model
from tests.support.launch import ROOT, run_ranks, train_ranks
from tests.support.layouts import dp2, pp2

transformers.logging.set_verbosity_error()
LAYOUTS = {"pipeline": pp2(1), "zero3": dp2(3), "documents": pp2(1)}  # "documents" with --document_attention
STEPS = 3
_MODEL = "vocab_size=260,n_layer=2,n_embd=64"
TEXTS = ["Grüße aus Köln! " * 9, "x", "a longer document, of several windows " * 6]
_LLAMA = {"model_type": "llama", "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny model with the same data on 2 ranks, and return the folder of the runs of LAYOUTS."""
    base = tmp_path_factory.mktemp("evaluate")
    write_byte_tokenizer(base / "tokenizer")
    with IndexedWriter(base / "corpus", np.uint16) as writer:
        for number in range(150):
            writer.add_document([*f"{number % 7} of {number}, ".encode() * 20, EOD])
        writer.finalize({"vocab_size": 257, "max_token": EOD, "eod_token": EOD,
                         "tokenizer_sha256": load_tokenizer(base / "tokenizer").fingerprint})
    (base / "few.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (base / "text.txt").write_text(TEXTS[2])
    for name, config in LAYOUTS.items():
        (base / f"{name}.json").write_text(json.dumps(config))
        values = {**flags("corpus", steps=STEPS, tokenizer="tokenizer"), "model_overrides": _MODEL, "split": "70,20,10",
                  "eval_steps": 2, "deepspeed_config": f"{name}.json", "save": name,
                  "document_attention": name == "documents"}
        done = train_ranks(2, [f"--{key}={value}" for key, value in values.items()], base)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    return base


def evaluate(cwd: Path, *words: str, ranks: int = 1) -> dict[str, Any]:
    """Run tools/evaluate.py and return the content of its --json file."""
    out = cwd / "out.json"
    out.unlink(missing_ok=True)
    done = run_ranks([str(ROOT / "tools/evaluate.py"), *words, "--json", str(out)], ranks, cwd=cwd)
    assert [rank.returncode for rank in done] == [0] * ranks, [rank.stdout[-3000:] for rank in done]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def in_process(monkeypatch: pytest.MonkeyPatch, cwd: Path, *words: str) -> dict[str, Any]:
    """Call the main function of tools/evaluate.py in this process: a second faster than a process."""
    from tests.wrong_inputs.case import main_of

    out = cwd / "out.json"
    out.unlink(missing_ok=True)
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *words, "--json", str(out)])
    assert main_of("evaluate")() == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    return lambda cwd, *words: in_process(monkeypatch, cwd, *words)


@pytest.fixture
def source(tmp_path: Path) -> EvaluationSource:
    save_hf_model(tmp_path / "hf", _LLAMA)
    return evaluation_source(tmp_path / "hf", None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_losses_of_the_run_are_reproduced(runs: Path, alone: Evaluate, layout: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in (runs / layout).rglob("*")}
    found = alone(runs, layout)
    assert {path: path.stat().st_mtime_ns for path in (runs / layout).rglob("*")} == before  # it only reads
    rows = [json.loads(line) for line in (runs / layout / "metrics.jsonl").read_text().splitlines()]
    expected = {row["split"]: row["eval_loss"] for row in rows if row.get("step") == STEPS and "eval_loss" in row}
    assert {row["data"]: row["loss"] for row in found["data"]} == pytest.approx(
        {f"{split}, as in training": loss for split, loss in expected.items()}, rel=1e-6)
    assert set(expected) == {"valid", "test"}
    assert [row["tokens"] for row in found["data"]] == [2 * 8 * 64] * 2
    other = alone(runs, layout, "--no-document_attention" if layout == "documents" else "--document_attention")
    assert [row["loss"] for row in other["data"]] != pytest.approx(list(expected.values()), rel=1e-6)
    if layout == "documents":
        partitioned = evaluate(runs, layout, "--partition_weights", ranks=2)
        assert [row["loss"] for row in partitioned["data"]] == pytest.approx(list(expected.values()), rel=1e-6)


def test_changed_data_is_rejected(runs: Path, alone: Evaluate, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """Without --data, the evaluation of the run is repeated, which is not possible with other data."""
    run = tmp_path / "run"
    shutil.copytree(runs / "zero3", run)
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace(str(runs / "corpus"), str(tmp_path / "corpus")))
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(runs / f"corpus{suffix}", tmp_path / f"corpus{suffix}")
    assert alone(tmp_path, "run")["data"] == alone(runs, "zero3")["data"]
    (tmp_path / "corpus.bin").write_bytes(bytes(2) + (tmp_path / "corpus.bin").read_bytes()[2:])
    capsys.readouterr()
    with pytest.raises(AssertionError):  # exit code 2
        alone(tmp_path, "run")
    assert f"error: {tmp_path / 'corpus'} (valid): the data has changed since the run" in capsys.readouterr().err
    assert alone(tmp_path, "run", "--split", "valid")["data"] == alone(runs, "zero3", "--split", "valid")["data"]


@pytest.mark.parametrize(("precision", "flag", "expected"), [
    ("bf16", None, "bf16"), ("fp16", None, "fp32"), ("fp16", "bf16", "bf16"), ("fp32", None, "fp32")])
def test_default_dtype(source: EvaluationSource, precision: str, flag: str | None, expected: str) -> None:
    device = Device("cpu", fp16=False, bf16=True, memory_bytes=0)
    assert evaluation_dtype(replace(source, precision=precision), device, flag) == expected


def test_weights_are_partitioned_if_they_do_not_fit(source: EvaluationSource) -> None:
    num_bytes = 4 * source.config.num_parameters()
    two_hosts = World(rank=0, size=4, local_rank=0, local_size=2, launcher="none")
    for kind, memory_bytes, partitioned in (("cuda", num_bytes, True), ("cuda", 2 * num_bytes, False),
                                            ("cpu", 2 * num_bytes, True), ("cpu", 3 * num_bytes, False)):
        device = Device(kind, fp16=True, bf16=True, memory_bytes=memory_bytes)
        assert choose_partition(source, "fp32", device, two_hosts, None) == partitioned
        assert not choose_partition(source, "fp32", device, ALONE, None)
        assert not choose_partition(source, "fp32", device, two_hosts, False)


def test_neither_ranks_nor_batches_nor_layouts_change_the_result(runs: Path, alone: Evaluate) -> None:
    words = ("--data", "corpus", "few.jsonl", "text.txt", "--split", "valid", "--stride", "24")
    expected = alone(runs, "zero3", *words, "--micro_batch_size", "1")
    assert [row["data"] for row in expected["data"]] == ["corpus", "few.jsonl", "text.txt", "valid"]
    for found, partitioned in (
            (alone(runs, "pipeline", *words, "--micro_batch_size", "7"), False),
            (evaluate(runs, "zero3/checkpoints/global_step3", *words, ranks=2), False),
            (evaluate(runs, "pipeline", *words, "--partition_weights", "--local_rank=0", ranks=2), True)):
        assert found["partitioned_weights"] == partitioned
        for row, before in zip(found["data"], expected["data"], strict=True):
            for key in ("data", "seq_length", "stride", "windows", "tokens", "bytes"):
                assert row[key] == before[key]
            for key in ("loss", "standard_error", "perplexity", "bits_per_byte"):
                assert row[key] == pytest.approx(before[key], rel=1e-5), key
    texts = expected["data"][1:3]
    assert [row["bytes"] for row in texts] == [row["tokens"] for row in texts] == [
        sum(len(text.encode()) for text in TEXTS), len(TEXTS[2])]


def test_masked_tokens_and_windows_that_are_left_out(runs: Path, alone: Evaluate) -> None:
    complete, masked = (alone(runs, "zero3", "--split", "valid", flag)["data"][0]
                        for flag in ("--no-eod_mask_loss", "--eod_mask_loss"))
    documents = 30
    assert masked["tokens"] == complete["tokens"] - (documents - 1)
    assert masked["bytes"] == complete["bytes"] - (documents - 1)
    few = alone(runs, "zero3", "--split", "valid", "--max_samples", "3")["data"][0]
    assert (few["windows"], few["tokens"]) == (3, 3 * 64)


def _loss_of_text(model: Any, text: str, *, length: int, stride: int, context: int) -> float:
    """Return the sum of the losses of a document, one forward pass of the transformers model for each token."""
    tokens = [context, *text.encode()]
    total = 0.0
    for target in range(1, len(tokens)):
        windows_before = max(0, -(-(target - length) // stride))
        last = min(length + windows_before * stride, len(tokens) - 1)  # target of the window's last input
        logits = model(torch.tensor([tokens[max(last - length, 0):target]])).logits[0, -1].double()
        total -= float(torch.log_softmax(logits, 0)[tokens[target]])
    return total


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 9, 16])
def test_a_transformers_folder_has_the_losses_that_transformers_computes(tmp_path: Path, alone: Evaluate,
                                                                         stride: int) -> None:
    model = save_hf_model(tmp_path / "hf", _LLAMA)
    write_byte_tokenizer(tmp_path / "hf")
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in TEXTS))
    words = ("--data", "text.jsonl", "--jsonl_key", "body", "--seq_length", "16", "--stride", str(stride))
    found = alone(tmp_path, "hf", *words)
    (row,) = found["data"]
    expected = sum(_loss_of_text(model, text, length=16, stride=stride, context=EOD) for text in TEXTS)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (row["tokens"], row["bytes"], found["dtype"]) == (num_bytes, num_bytes, "fp32")
    assert row["loss"] == pytest.approx(expected / num_bytes, rel=1e-5)
    assert row["bits_per_byte"] == pytest.approx(expected / num_bytes / math.log(2), rel=1e-5)
    if stride == 16:  # the imported checkpoint, which has weights only
        source = check_hf_folder(tmp_path / "hf")
        import_hf(source, tmp_path / "run", find_hf_tokenizer(source))
        assert alone(tmp_path, "run", *words)["data"] == found["data"]


@pytest.mark.parametrize("with_eod", [True, False])
def test_a_uniform_model_has_the_closed_form(tmp_path: Path, alone: Evaluate, with_eod: bool) -> None:
    """With a zero output matrix, each token costs ln(vocabulary size), also a first token without any context."""
    model = hf_model(tmp_path / "hf", {**_LLAMA, "bos_token_id": None, "eos_token_id": None})
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path / "hf")
    write_byte_tokenizer(tmp_path / "hf", with_eod=with_eod)
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ["", *TEXTS]))
    for words in ((), ("--stride", "5", "--max_samples", "20")):
        (row,) = alone(tmp_path, "hf", "--data", "text.jsonl", *words)["data"]
        assert row["tokens"] == row["bytes"]
        assert words or row["bytes"] == sum(len(text.encode()) for text in TEXTS)
        assert row["loss"] == pytest.approx(math.log(260), rel=1e-6)
        assert row["perplexity"] == pytest.approx(260, rel=1e-5)
        assert row["bits_per_byte"] == pytest.approx(math.log2(260), rel=1e-6)
        assert row["standard_error"] == pytest.approx(0, abs=1e-4)
    (tmp_path / "doubt").write_text('{"text": "a"}\nwords')
    assert alone(tmp_path, "hf", "--data", "doubt", "--format", "text")["data"][0]["bytes"] == 19


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_checkpoints_are_rejected(ranks: int, runs: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "run"
    shutil.copytree(runs / "zero3", damaged)
    (path,) = damaged.glob("checkpoints/*/*rank_1_*optim_states.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    words = [str(ROOT / "tools/evaluate.py"), str(damaged), "--data", str(runs / "corpus")]
    done = run_ranks(words, ranks, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [2] * ranks
    errors = [line for rank in done for line in rank.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "the checkpoint is damaged" in errors[0]
    assert path.name in errors[0]
