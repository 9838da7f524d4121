"""Tiny config.jsons of architectures that have no family here: they are wrapped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pretrain.active_extensions import extensions
from pretrain.model.own_models import transformers_config

ARE_WRAPPED = any(each.models for each in extensions())  # each extension can be left out
needs_wrapped = pytest.mark.skipif(not ARE_WRAPPED, reason="no extension wraps models of transformers")

_SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
          "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}

WRAPPED_MODELS: dict[str, dict[str, Any]] = {
    # rotary positions, grouped-query attention, scaled embedding and logits, an untied head
    "granite": {**_LLAMA, "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    # learned positions, projections before and after the decoder layers, a tied head
    "opt": {**_SIZES, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64,
            "dropout": 0.0},
    # scaled logits of a tied head, one norm for attention and MLP
    "cohere": {**_LLAMA, "model_type": "cohere", "logit_scale": 0.5},
    # compressed keys and values, a dense layer, then experts whose router has a bias that is a buffer
    "deepseek_v3": {**_LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 16,
                    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
                    "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    # layers of two kinds: convolution and attention
    "lfm2": {**_LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
    # inputs of each layer that depend on the tokens, windows, capped logits of a tied head. The vector of the padding
    # token remains zero, where the norm after it is so steep that rounding errors grow: no token of the data is one
    "gemma4_text": {**_LLAMA, "model_type": "gemma4_text", "pad_token_id": 255, "head_dim": 8,
                    "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 4, "sliding_window": 8,
                    "per_layer_config": None,
                    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    # no attention
    "mamba2": {"model_type": "mamba2", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
               "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "chunk_size": 16, "bos_token_id": 1,
               "eos_token_id": 2, "pad_token_id": 0},
}


def published(values: dict[str, Any], folder: Path) -> Any:
    """Write a folder as `save_pretrained` does, with random weights and buffers, and return the model in fp32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers_config(values), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    model.save_pretrained(folder)
    return model
