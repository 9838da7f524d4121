"""Hints in the log of real runs. Healthy runs of many kinds get none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data.token_files.writer import IndexedWriter
from pretrain.monitor.read_run_folder import read_rows
from tests.support.cases import DROPOUT, config
from tests.support.launch import ROOT, train_ranks
from tests.support.layouts import fp16
from tests.support.model_shapes import SHAPES


def optimizer(kind: str, lr: float, *, precision: str = "fp32", **params: Any) -> dict[str, Any]:
    return {**config(1, precision=precision), "optimizer": {"type": kind, "params": {"lr": lr, **params}}}


HEALTHY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # (DeepSpeed JSON, flags); "shape": of the model
    "gpt2": (config(1), {}),
    "bf16_llama": (config(2, precision="bf16", lr=3e-4), {"shape": "llama"}),
    "high_rate": (config(1, lr=1e-2), {}),
    "low_rate": (config(0, lr=1e-5), {}),
    "fp16": (fp16(config(1)), {"emulate_fp16": True}),
    "zero3_neox": (config(3, precision="bf16"), {"shape": "neox_parallel"}),
    "gemma2": (config(2, lr=2e-3), {"shape": "gemma2"}),
    "mistral": (config(1, lr=6e-4), {"shape": "mistral_multi_query"}),
    "untied": (config(1, lr=5e-3), {"shape": "gpt2_untied"}),
    "dropout": (config(1), {"model_overrides": DROPOUT}),
    "label_smoothing": (config(1), {"label_smoothing": 0.1, "z_loss": 1e-4}),
    "lion": (optimizer("Lion", 1e-4, weight_decay=1.0), {"offload": True}),
    "sgd": (optimizer("SGD", 0.1, momentum=0.9), {}),
    "muon": (optimizer("Muon", 0.02, precision="bf16"), {}),
    "adagrad": (optimizer("Adagrad", 1e-2), {"offload": True}),
    "words": (config(1), {"data": "words", "vocab_size": 4096}),
    "long_warmup": (config(1), {"lr_warmup_steps": 39}),
    "wsd": (config(1, precision="bf16"), {"lr_schedule": "wsd"}),
    "mup": (config(1, lr=1e-2), {"mup_base_width": 32, "model_overrides": "tie_word_embeddings=false"}),
    "documents": (config(1), {"document_attention": True, "eod_mask_loss": True}),
}
SICK: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rate_100_times_too_high": (config(1, lr=0.1), {}, "the loss has risen from 5."),
    "bf16_rate_too_low": (config(1, precision="bf16", lr=1e-7), {}, "an update changes the weights by "),
    "sgd_rate_too_low": (optimizer("SGD", 1e-5), {}, "an update changes the weights by "),
    "constant": (config(1, lr=1e-2), {"data": "constant"}, "the loss is 0.0"),
}
FAST = ("gpt2", "rate_100_times_too_high", "bf16_rate_too_low")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write token files of the words of this package's source code, and return their prefix."""
    numbers: dict[str, int] = {}
    prefix = tmp_path_factory.mktemp("words") / "words"
    with IndexedWriter(prefix, np.uint16) as writer:
        for path in sorted((ROOT / "pretrain").rglob("*.py")):
            writer.add_document(np.array([*(numbers.setdefault(word, 1 + len(numbers) % 4095)
                                            for word in path.read_text().split()), 0]))
        writer.finalize({"vocab_size": 4096, "max_token": 4095, "eod_token": 0})
    return str(prefix)


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("constant") / "constant"
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(100):
            writer.add_document(np.full(500, 7))
        writer.finalize()
    return str(prefix)


def hints_of(folder: Path, values: dict[str, Any], given: dict[str, Any], data: dict[str, str]) -> list[str]:
    """Train 40 steps on one rank. Return the hints of events.jsonl, which must also be printed."""
    given = dict(given)
    shape, size = given.pop("shape", ""), given.pop("vocab_size", 256)
    overrides = given.pop("model_overrides", "")
    if given.pop("offload", False):
        values["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = {**SHAPES[shape], "vocab_size": size} if shape else None
    (folder / "ds.json").write_text(json.dumps({**values, "gradient_accumulation_steps": 1}))
    flags = {"deepspeed_config": "ds.json", "model": "tiny", "model_overrides": ",".join(
        [f"vocab_size={size},n_layer=2,n_embd=64", *([overrides] if overrides else [])]), "seq_length": 64,
             "train_data": data[given.pop("data", "steps")], "split": "80,20,0", "train_steps": 40, "eval_steps": 1,
             "log_interval": 5, "save": "run", **given}
    if model is not None:
        (folder / "model.json").write_text(json.dumps(model))
        flags |= {"model": "model.json", "model_overrides": f"vocab_size={size}"}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    (done,) = train_ranks(1, words, folder)
    assert done.returncode == 0, done.stdout
    events = read_rows(folder / "run" / "events.jsonl")
    hints = [row["reason"] for row in events if row["event"] == "hint"]
    assert all(f"hint: {hint}" in done.stdout for hint in hints)
    return hints


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
                                  for name in HEALTHY])
def test_a_healthy_run_gets_no_hint(name: str, corpus: str, words: str, tmp_path: Path) -> None:
    assert hints_of(tmp_path, *HEALTHY[name], {"steps": corpus, "words": words}) == []


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
                                  for name in SICK])
def test_a_run_that_does_not_learn_gets_one_hint(name: str, corpus: str, constant: str, tmp_path: Path) -> None:
    values, given, expected = SICK[name]
    (hint,) = hints_of(tmp_path, values, given, {"steps": corpus, "constant": constant})
    assert hint.startswith(expected)
