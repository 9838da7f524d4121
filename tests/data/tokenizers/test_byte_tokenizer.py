"""--tokenizer bytes: from the preparation to a trained run, generated text and an export."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pretrain.commands import COMMANDS
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.tokenizers.export_tokenizer import export_tokenizer
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from tests.support.launch import ROOT
from tests.support.programs import run_program, run_programs

TEXTS = ["def f():\n    return 1\n", "h\u00e9llo \u4f60\u597d \0 \U0001f600", "<|endoftext|>"]


@given(st.lists(st.text()))
def test_tokens_are_the_bytes_of_a_text(texts: list[str]) -> None:
    tokenizer = load_tokenizer("bytes")
    tokens, ends = tokenizer.encode_batch(texts)
    parts = [part.tolist() for part in np.split(tokens, ends)[: len(texts)]]
    assert parts == [tokenizer.encode(text) for text in texts] == [list(text.encode()) for text in texts]
    assert [tokenizer.decode([257, *part, 256]) for part in parts] == texts


def test_runs_of_all_versions_have_the_same_fingerprint() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.fingerprint == "7efa828c912f0a774b3a1605740cd6da461e940e95b7d45b1c16f035faa8e6cd"
    assert (tokenizer.vocab_size, tokenizer.eod_token, tokenizer.ids.bos, tokenizer.name) == (258, 256, 257, "bytes")
    assert tokenizer.decode([0xFF, 0x61]) == "\ufffda"


def test_a_file_with_this_name_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").touch()
    with pytest.raises(ConfigError, match="this word means the byte tokenizer, and there is a file"):
        load_tokenizer("bytes")
    with pytest.raises(ConfigError, match="SentencePiece cannot read its 0 bytes"):
        load_tokenizer(tmp_path / "bytes")


def test_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    export_tokenizer("bytes", tmp_path, texts=TEXTS)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs(text)["input_ids"] for text in TEXTS] == [list(text.encode()) for text in TEXTS]
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (256, 257, 258)
    assert load_tokenizer(tmp_path).encode(TEXTS[1]) == list(TEXTS[1].encode())


def test_a_run_with_bytes_and_packing(tmp_path: Path) -> None:
    """Real programs: prepare, train with --packing best_fit, generate, evaluate and export."""
    documents = [{"text": f"number {number} is {number * number}. " * (number % 9 + 1)} for number in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    (tmp_path / "ds.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))

    run_program(tmp_path, f"{ROOT}/tools/prepare_data.py", "text.jsonl", "--tokenizer", "bytes", "--out", "data")
    assert json.loads((tmp_path / "data.meta.json").read_text())["tokenizer"] == "bytes"
    data = IndexedDataset(tmp_path / "data")
    assert bytes(data.tokens(0, data.document_offset(1) - 1).tolist()).decode() == documents[0]["text"]
    train = [f"{ROOT}/pretrain/train.py", "--deepspeed_config", "ds.json", "--model", "tiny", "--model_overrides",
             "vocab_size=258,n_layer=1", "--train_data", "data", "--tokenizer", "bytes", "--packing", "best_fit",
             "--eval_steps", "1", "--save", "run"]
    printed = run_program(tmp_path, *train, "--seq_length", "256", "--train_steps", "2")
    assert "--packing best_fit: positions of the samples that have a token: data 9" in printed
    assert json.loads((tmp_path / "run" / "run.json").read_text())[0]["flags"]["tokenizer"] == "bytes"
    run_programs(tmp_path, [
        *([[f"{ROOT}/tools/generate.py", "run", "--prompt", "number", "--max_new_tokens", "3"]]
          if "generate" in COMMANDS else []),
        [f"{ROOT}/tools/export_hf.py", "run", "--output", "export"],
        [f"{ROOT}/tools/evaluate.py", "run", "--json", "losses.json"]])
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("a b")["input_ids"] == [97, 32, 98]
    trained = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((tmp_path / "losses.json").read_text())
    assert found["data"][0]["loss"] == pytest.approx(next(row["eval_loss"] for row in trained if "eval_loss" in row),
                                                     rel=1e-4)
