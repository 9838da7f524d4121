"""A run of another program in memory: a transformers model, and optimizer states that look like AdamW's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from pretrain.extensions.adopt.foreign_run import ForeignRun
from tests.support.hf_models import hf_model

STATES = ("exp_avg", "exp_avg_sq")
_SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
          "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama"}, "qwen3": {**_SIZES, "model_type": "qwen3"},
    "tied": {**_SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {key: value for key, value in _SIZES.items() if key != "head_dim"} | {"model_type": "qwen2"},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "n_inner": 128, "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0}}
Tensors = dict[str, dict[str, torch.Tensor]]  # state -> name -> tensor
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}


def foreign_states(folder: Path, values: dict[str, Any]) -> Tensors:
    """Return "fp32" and the optimizer states of a random model by transformers' names; the folder gets config.json."""
    weights = {name: parameter.detach() for name, parameter in hf_model(folder, values).named_parameters()}
    generator = torch.Generator().manual_seed(5)
    random = {state: {name: torch.rand(weight.shape, generator=generator) for name, weight in weights.items()}
              for state in STATES}
    return {"fp32": weights, **random}


def foreign_run(folder: Path, values: dict[str, Any], **others: Any) -> ForeignRun:
    """Return a run of a model, at step 6 after 48 samples, whose file is its config.json."""
    states = foreign_states(folder, values)
    run = ForeignRun(
        program="a program", folder=folder, files=(folder / "config.json",),
        config=json.loads((folder / "config.json").read_text()),
        shapes={name: tuple(weight.shape) for name, weight in states["fp32"].items()},
        read=lambda name, state: states[state][name], states=STATES, step=6, optimizer_step=6, optimizer=ADAMW,
        weight_decay={name: 0.1 if weight.dim() > 1 else 0.0 for name, weight in states["fp32"].items()},
        learning_rate=1e-3, global_batch_size=8, consumed_samples=48, seq_length=64, seed=5)
    return dataclasses.replace(run, **others)


def check_equal(run: ForeignRun, theirs: Tensors) -> None:
    """Compare all tensors of a run with those of transformers' model."""
    assert run.shapes == {name: tuple(tensor.shape) for name, tensor in theirs["fp32"].items()}
    for state in ("fp32", *STATES):
        for name, tensor in theirs[state].items():
            assert torch.equal(run.read(name, state), tensor), (name, state)
