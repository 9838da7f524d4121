"""The choice of operators on CUDA. No GPU is used: torch's reference of flex_attention runs in place of its kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as torch_flex

from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_run
from pretrain.distributed.device import Device
from pretrain.engine import chosen_operators as operators
from pretrain.engine.chosen_operators import choose_attention
from pretrain.model.attention_memory import expected_operator
from pretrain.model.kernels import flex_attention
from tests.support.model_shapes import SHAPES, write_config

CUDA = Device("cuda", fp16=True, bf16=True, memory_bytes=0)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let flex_attention run on the CPU, on a single rank. Returns the list of functions that change its outputs."""
    changes: list[Any] = []
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention._operator(), backend="aot_eager", dynamic=False)

    def operator(*tensors: torch.Tensor, **how: Any) -> torch.Tensor:
        out = compiled(*tensors, **how)
        return changes[0](out) if changes else out

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "_compiled_operator", lambda: operator)
    monkeypatch.setattr(flex_attention, "has_triton", lambda: True)
    monkeypatch.setattr(operators, "why_not_flex",
                        lambda q, dropout, on_cuda: flex_attention.why_not_flex(q, dropout=dropout, on_cuda=True))
    monkeypatch.setattr(operators, "gather", lambda value: [value])
    monkeypatch.setattr(flex_attention._Failure, "reason", "")
    return changes


def plan_of(tmp_path: Path, corpus: str, name: str, **flags: str) -> Plan:
    shape = SHAPES[name] | ({"max_seq_len": 256, "d_model": 64} if name == "mpt" else
                            {"max_position_embeddings": 256, "hidden_size": 64})
    shape["vocab_size"] = 256
    model = write_config(tmp_path, shape)
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, '
                      '"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}')
    words = {"deepspeed_config": config, "model": model, "train_data": corpus, "seq_length": 256, "train_steps": 2,
             "save": tmp_path / "run", **flags}
    return check_run(parse_arguments([f"--{key}={value}" for key, value in words.items()]), world_size=1, device=CUDA)


def test_special_attentions_use_the_kernel_that_passed_its_test(on_cpu, tmp_path, corpus):
    for name in ("gemma2", "mpt"):
        assert choose_attention(plan_of(tmp_path, corpus, name), torch.device("cpu")) == "flex_attention"
    plan = plan_of(tmp_path, corpus, "llama", document_attention="true")
    assert choose_attention(plan, torch.device("cpu")) == "flex_attention"


@pytest.mark.parametrize(("change", "reason"), [
    (lambda out: out * 1.1, "its output differs by 0.1"),
    (lambda out: out.detach() + (out - out.detach()) * 2, "its gradient of q differs by 1"),
    (lambda out: 1 / 0, "division by zero")])
def test_a_kernel_that_fails_its_test_is_not_used(change, reason, on_cpu, tmp_path, corpus):
    on_cpu.append(change)
    plan = plan_of(tmp_path, corpus, "llama", document_attention="true")
    described = choose_attention(plan, torch.device("cpu"))
    assert described.startswith("flash with a mask (no flex_attention: its kernel failed:")
    assert reason in described
    q = torch.empty(1, 2, 256, 16, dtype=torch.bfloat16)
    assert reason in flex_attention.why_not_flex(q, dropout=0.0, on_cuda=True)


def test_the_usual_attention_is_named_as_torch_chooses_it(monkeypatch, tmp_path, corpus):
    plan = plan_of(tmp_path, corpus, "llama")
    names = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                    SDPBackend.MATH):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *inputs, backend=backend, **how: backend.value)
        names.append(choose_attention(plan, torch.device("cpu")).split(" (")[0])
    assert names == ["flash", "cuDNN", "efficient", "math"]


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, "flash or cuDNN"), ({"precision": "fp32"}, "efficient kernel: the flash kernel needs bf16"),
    ({"head_size": 288}, "up to 256"), ({"special": True}, "flex_attention, a fused kernel"),
    ({"special": True, "plain": True}, "efficient kernel with a mask, not flex_attention: --plain_operators"),
    ({"special": True, "seq_length": 1000}, "not a multiple of 128"),
    ({"special": True, "head_size": 80}, "80 elements"),
    ({"special": True, "softcap": True, "dropout": 0.1}, "separate operators, not flex_attention: attention dropout")])
def test_the_expected_operator_names_its_reason(changes, expected):
    usual = {"precision": "bf16", "head_size": 64, "seq_length": 1024, "dropout": 0.0, "special": False,
             "softcap": False, "plain": False}
    assert expected in expected_operator(**(usual | changes))
