"""Tiny models of every architecture, for the tests of pretrain/model."""

import json
from pathlib import Path
from typing import Any

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16}
_LLAMA = {"model_type": "llama", "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
_GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NEOX = {"model_type": "gpt_neox", "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64, "rotary_pct": 0.25}

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2_untied": {**_GPT2, "tie_word_embeddings": False, "n_inner": 56},
    "llama": {**_LLAMA, "rope_theta": 5000.0},
    "llama_tied_llama3_rope": {**_LLAMA, "tie_word_embeddings": True, "rope_theta": 5000.0,
                               "rope_scaling": LLAMA3_ROPE},
    "llama_biases_linear_rope": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16,
                                 "rope_parameters": {"rope_theta": 900.0, "rope_type": "linear", "factor": 2.0}},
    "llama_dynamic_rope": {**_LLAMA, "max_position_embeddings": 16,
                           "rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "llama_yarn_rope": {**_LLAMA, "head_dim": 16, "rope_theta": 500.0, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "neox_parallel": _NEOX,
    "neox_sequential": {**_NEOX, "use_parallel_residual": False, "rotary_emb_base": 700.0, "rotary_pct": 0.5},
    "neox_yarn_rope": {**_NEOX, "rotary_pct": 0.5, "rope_scaling": {
        "rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 24, "beta_fast": 4.0, "beta_slow": 0.5,
        "mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False}},
    "neox_tied_no_bias": {**_NEOX, "tie_word_embeddings": True, "attention_bias": False},
}


def write_config(folder: Path, values: dict[str, Any]) -> str:
    """Write a config.json into `folder`. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)
