"""Transformers models with random weights, saved as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from pretrain.checkpoint.convert.write_weights import PlannedTensor, index_json, shards_of, write_shards
from pretrain.checkpoint.load.reader import chunks_of
from pretrain.model.config import model_config_from
from pretrain.model.hf_names import name_in_files, tensor_rules
from pretrain.model.parameters import DTYPES
from tests.support.model_shapes import write_config


def needs_transformers(version: str, reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that compares with a behaviour of transformers which `version` introduced."""
    return pytest.mark.skipif(Version(transformers.__version__) < Version(version), reason=reason)


SAVES_PHI_ONCE = needs_transformers("5.20", "it writes Phi's partial_rotary_factor twice, with two values")


def hf_model(folder: Path, values: dict[str, Any], *, seed: int = 11) -> "transformers.PreTrainedModel":
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
                  seed: int = 11) -> "transformers.PreTrainedModel":
    """Save a random model with transformers' save_pretrained and return it."""
    model = hf_model(folder, values, seed=seed).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def write_hf_model(folder: Path, values: dict[str, Any], *, dtype: str = "fp32", shard_bytes: int) -> int:
    """Write a transformers folder of any size with random weights, in little memory. Return its bytes of weights."""
    config = model_config_from(json.loads(Path(write_config(folder, values)).read_text()), "config.json")
    planned = [PlannedTensor(name_in_files(name, config), dtype, shape) for rule in tensor_rules(config)
               for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)]
    shards = shards_of(planned, shard_bytes, "model")
    generator = torch.Generator().manual_seed(3)
    chunks = (torch.empty(length, dtype=DTYPES[dtype]).normal_(0, 0.02, generator=generator) for tensor in planned
              for _, length in chunks_of(tensor.num_elements))
    records = write_shards(folder, shards, chunks)
    (folder / "model.safetensors.index.json").write_text(index_json(shards))
    return sum(record.bytes for record in records.values())
