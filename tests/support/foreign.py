"""A run of another program in memory: a transformers model, and optimizer states that look like AdamW's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.adopt.foreign_run import ForeignRun
from tests.support.hf_models import hf_model

STATES = ("exp_avg", "exp_avg_sq")
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}


def foreign_states(folder: Path, values: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
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
