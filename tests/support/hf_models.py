"""Transformers models with random weights, saved as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.model_shapes import write_config


def hf_model(folder: Path, values: dict[str, Any], *, seed: int = 11) -> transformers.PreTrainedModel:
    """Return the model of a config.json, which is written into `folder`. Large weights make every term count."""
    values = {"bos_token_id": 0, "eos_token_id": 0, **values}
    config = transformers.AutoConfig.from_pretrained(write_config(folder, values))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            center = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.empty_like(parameter).normal_(center, 0.15, generator=generator))
    return model.eval()


def save_hf_model(folder: Path, values: dict[str, Any], *, shard_size: str = "1GB", dtype: torch.dtype = torch.float32,
                  seed: int = 11) -> transformers.PreTrainedModel:
    """Save a random model with transformers' save_pretrained and return it."""
    model = hf_model(folder, values, seed=seed).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model
