"""FLOPs by hand, and the summary of a run folder."""

import json
from pathlib import Path

import pytest

from pretrain.analysis.summary import summarize
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from pretrain.model.flops import flops_per_token
from pretrain.monitor.peak_flops import peak_tflops


def test_flops_count_the_head_once_tied_or_not() -> None:
    gpt2, llama = load_model_config("gpt2"), load_model_config("llama3-8b")
    # parameters less what is looked up or only added: token and position embeddings, the last norm; plus the head
    gpt2_matrices = 124_439_808 - 1024 * 768 - 2 * 768
    llama_matrices = 8_030_261_248 - 128_256 * 4096 - 4096
    assert flops_per_token(gpt2, 1024) == 6 * gpt2_matrices + 12 * 12 * 768 * 1024
    assert flops_per_token(llama, 8192) == 6 * llama_matrices + 12 * 32 * 4096 * 8192


@pytest.mark.parametrize(("name", "precision", "expected"), [
    ("NVIDIA H200", "bf16", 989.0), ("NVIDIA H100 PCIe", "bf16", 756.0), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
    ("NVIDIA A10G", "bf16", 70.0), ("A device of tomorrow", "bf16", None)])
def test_peaks(name: str, precision: str, expected: float | None) -> None:
    assert peak_tflops(name, precision) == expected


def test_summary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        summarize(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps([{
        "flags": {"valid_data": str(tmp_path / "valid"), "train_data": "x"}, "train_steps": 9}]))
    (tmp_path / "valid.meta.json").write_text(json.dumps({"entropy_nats": 5.0}))
    rows = [{"step": 4, "loss": 4.5, "tokens_per_second": 10.0}, {"step": 4, "split": "valid", "eval_loss": 4.75}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 5, "lo')  # cut by a kill
    summary = summarize(tmp_path)
    assert (summary.step, summary.train_steps, summary.valid_loss, summary.unigram_entropy) == (4, 9, 4.75, 5.0)
    assert summary.below_unigram_entropy
