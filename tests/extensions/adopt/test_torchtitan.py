"""Checkpoints of torchtitan; their losses after a resume are in tests/extensions/adopt/test_dcp_runs.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.extensions.adopt.adopt import plan_adoption
from pretrain.extensions.adopt.dcp import read
from pretrain.extensions.adopt.foreign_run import with_sample_length
from pretrain.extensions.adopt.sources import find_source
from tests.extensions.adopt.dcp_writer import remove_optimizer, write_dcp
from tests.extensions.adopt.foreign import MODELS, STATES, Tensors, check_equal, foreign_states
from tests.support.rejection import rejection


def pairs(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """Put element i of the second half of each head after element i of the first half."""
    halves = matrix.reshape(-1, 2, size // 2, *matrix.shape[1:])
    return torch.stack([halves[:, 0], halves[:, 1]], 2).reshape(matrix.shape)


def torchtitan_names(version: str) -> dict[str, str]:
    """Return the part of transformers' names -> torchtitan's."""
    attention = "attention.qkv_linear." if version == "0.3" else "attention."
    return {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "model.layers": "layers",
            "lm_head": "lm_head" if version == "0.3" else "output",
            **{f"self_attn.{part}_proj": f"{attention}w{part}" for part in "qkv"}, "self_attn.o_proj": "attention.wo",
            "self_attn.": "attention.", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
            "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm"}


def torchtitan_checkpoint(folder: Path, theirs: Tensors, model: dict[str, Any], version: str,
                          **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and other values of a checkpoint of a version of torchtitan."""
    tensors, values = {}, {"train_state.step": 6, "lr_scheduler.last_epoch": 6, "dataloader.dp_rank_0": b"state",
                           "dataloader.world_size": 2, "train_state.ntokens_seen": 6 * 4 * 64}
    if version == "0.1":
        del values["train_state.ntokens_seen"]
    for name in theirs["fp32"]:
        fqn = name
        for old, new in torchtitan_names(version).items():
            fqn = fqn.replace(old, new, 1)
        for state in theirs:
            tensor = theirs[state][name]
            if model["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
                tensor = pairs(tensor, 8)
            prefix = "model." if version == "0.1" else ""
            tensors[f"{prefix}{fqn}" if state == "fp32" else f"optimizer.state.{fqn}.{state}"] = tensor
        tensors[f"optimizer.state.{fqn}.step"] = torch.tensor(6.0)
        for key, value in {"lr": 2e-3, "initial_lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False,
                           "maximize": False, "weight_decay": 0.1, "decoupled_weight_decay": True, **changes}.items():
            values[f"optimizer.param_groups.{fqn}.{key}"] = value
    return tensors, values


def fuse_qkv(tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    """Give the optimizer one matrix of queries, keys and values, by key head, as torchtitan 0.3 may have it."""
    for layer in range(2):
        for state in STATES:
            begin = f"optimizer.state.layers.{layer}.attention.qkv_linear."
            parts = [tensors.pop(f"{begin}w{part}.weight.{state}").view(2, -1, 8, 32) for part in "qkv"]
            tensors[f"{begin}wqkv.weight.{state}"] = torch.cat(parts, 1).reshape(-1, 32)
        for part in "qkv":
            tensors.pop(f"{begin}w{part}.weight.step")
        tensors[f"{begin}wqkv.weight.step"] = torch.tensor(6.0)
        for key in [key for key in values if f"layers.{layer}.attention.qkv_linear" in key]:
            values[key.replace("wq.", "wqkv.")] = values.pop(key)


@pytest.mark.parametrize(("version", "name", "fused"), [
    ("0.1", "llama", False), ("0.2", "llama", False), ("0.2", "qwen3", False), ("0.2", "tied", False),
    ("0.3", "qwen3", True), ("0.3", "llama", True)])
def test_torchtitan(version: str, name: str, fused: bool, tmp_path: Path) -> None:
    model = MODELS[name]
    theirs = foreign_states(tmp_path / "hf", model)
    tensors, values = torchtitan_checkpoint(tmp_path, theirs, model, version)
    if fused:
        fuse_qkv(tensors, values)
    if name == "tied":
        tensors["output.weight"] = tensors["tok_embeddings.weight"]
    if version == "0.1":
        angles = torch.outer(torch.arange(3.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
        tensors["model.freqs_cis"] = torch.polar(torch.ones_like(angles), angles)
    folder = write_dcp(tmp_path / "checkpoint" / "step-6", tensors, values)
    source = find_source(tmp_path / "checkpoint", step=6, config=model)
    assert source is not None
    run = source.read()
    check_equal(run, theirs)
    assert (run.step, run.optimizer_step, run.schedule, run.folder) == (
        6, 6.0, {"last_step": 6, "next_rate": 2e-3}, folder)
    assert run.optimizer == {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8,
                                                         "weight_decay": 0.1}}
    assert any("rope_theta" in note for note in run.notes) == (version != "0.1")
    assert run.consumed_tokens == (None if version == "0.1" else 3072)
    lost = "data_position (it records 3072 consumed tokens: --seq_length N makes samples of them)"
    assert (lost if version != "0.1" else "data_position") in rejection(lambda: plan_adoption(run, frozenset()))
    if version != "0.1":
        plan = plan_adoption(with_sample_length(run, 64), frozenset())
        assert plan.run.consumed_samples == 48
        assert plan.decay.flags == {"decay_vectors": True}
        assert "expected a divisor of 3072" in rejection(lambda: with_sample_length(run, 100))


def torchtitan_error(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], *,
                     config: dict[str, Any] | None = MODELS["llama"], version: str = "0.2", **changes: Any) -> str:
    theirs = foreign_states(folder / "hf", MODELS["llama"])
    tensors, values = torchtitan_checkpoint(folder, theirs, MODELS["llama"], version, **changes)
    change(tensors, values)
    return rejection(lambda: plan_adoption(read(write_dcp(folder / "step-6", tensors, values), config), frozenset()))


def add(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, values: (tensors if isinstance(value, torch.Tensor) else values).update({name: value})


def remove(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tensors: dict[str, Any], values: dict[str, Any]) -> None:
        del (tensors if name in tensors else values)[name]
    return change


def keep_all(tensors: dict[str, Any], values: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(("change", "settings", "expected"), [
    (keep_all, {"config": None}, "a checkpoint of torchtitan does not describe its model"),
    (keep_all, {"config": MODELS["gpt2"]}, "--model: found model_type gpt2; expected llama or qwen3"),
    (keep_all, {"config": {**MODELS["llama"], "num_key_value_heads": 4}}, "k_proj.weight: found the shape [16, 32]"),
    (keep_all, {"config": {**MODELS["llama"], "num_hidden_layers": 3}}, "the checkpoint does not"),
    (keep_all, {"config": MODELS["tied"]}, "--model: tie_word_embeddings: it is true, and output.weight"),
    (keep_all, {"amsgrad": True}, "without amsgrad and maximize"),
    (add("layers.0.moe.experts.w1", torch.zeros(4, 2)), {}, "layers.0.moe.experts.w1: this program does not know"),
    (add("tokenizer", 3), {}, "tokenizer: this program does not know"),
    (add("optimizer.state.norm.weight.momentum", torch.zeros(32)), {}, "optimizer (its states are exp_avg, exp_avg_sq"),
    (add("optimizer.state.norm.weight.step", torch.tensor(5.0)), {}, "optimizer.state: found the steps [5.0, 6.0]"),
    (add("optimizer.param_groups.norm.weight.betas", (0.9, 0.9)), {}, "an Adam with the same betas and eps"),
    (remove("optimizer.state.norm.weight.exp_avg"), {}, "norm.weight.exp_avg: the optimizer state is missing"),
    (remove("train_state.step"), {}, "train_state.step: found None"),
    (lambda tensors, _: remove_optimizer(tensors), {}, "optimizer (the checkpoint has weights alone)"),
    (add("model.freqs_cis", torch.polar(torch.ones(3, 4), torch.ones(3, 4))), {"version": "0.1"},
     "freqs_cis: found rotary frequencies from 1 to 1; expected 1 to 0.001")])
def test_torchtitan_checkpoints_that_are_not_understood(change: Any, settings: dict[str, Any], expected: str,
                                                        tmp_path: Path) -> None:
    assert expected in torchtitan_error(tmp_path, change, **settings)
