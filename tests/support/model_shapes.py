"""Tiny models of every family, for the tests of pretrain/model. Windows and soft-caps are so small that they act."""

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

_LLAMA_LIKE = {key: value for key, value in _LLAMA.items() if key != "model_type"}
_MISTRAL = {**_LLAMA_LIKE, "model_type": "mistral", "sliding_window": 12, "head_dim": 16}
_QWEN2 = {**_LLAMA_LIKE, "model_type": "qwen2", "sliding_window": 9}
_QWEN3 = {**_LLAMA_LIKE, "model_type": "qwen3", "head_dim": 16}
# without pad_token_id, whose embedding gets no gradient in transformers
_GEMMA = {**_LLAMA_LIKE, "model_type": "gemma", "head_dim": 16, "pad_token_id": None}
_GEMMA2 = {**_GEMMA, "model_type": "gemma2", "sliding_window": 10, "query_pre_attn_scalar": 20,
           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_GEMMA3 = {**_GEMMA, "model_type": "gemma3_text", "sliding_window": 7, "query_pre_attn_scalar": 12,
           "rope_theta": 30000.0, "rope_local_base_freq": 500.0}
_OLMO2 = {**_LLAMA_LIKE, "model_type": "olmo2", "rope_theta": 5000, "pad_token_id": None}

_GPTJ = {"model_type": "gptj", "vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64,
         "rotary_dim": 8}
_BLOOM = {"model_type": "bloom", "vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 4}
_MPT = {"model_type": "mpt", "vocab_size": 97, "d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}

_PHI = {"model_type": "phi", "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 80, "max_position_embeddings": 64}
_STABLELM = {**_PHI, "model_type": "stablelm", "num_key_value_heads": 2, "partial_rotary_factor": 0.5}
_STARCODER2 = {**_PHI, "model_type": "starcoder2", "sliding_window": 11}

# experts so small and so many that some of them get no token
_MIXTRAL = {**_LLAMA_LIKE, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
            "intermediate_size": 40, "rope_theta": 500.0}
_QWEN_MOE = {**_LLAMA_LIKE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_OLMOE = {**_LLAMA_LIKE, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 24,
          "pad_token_id": None, "eos_token_id": None}

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
    "mistral_multi_query": {**_MISTRAL, "num_key_value_heads": 1},
    "mistral_no_window_tied": {**_MISTRAL, "sliding_window": None, "tie_word_embeddings": True, "head_dim": None,
                               "num_key_value_heads": 4},
    "qwen2_tied": {**_QWEN2, "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen2_upper_windows": {**_QWEN2, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 20},
    "qwen3": _QWEN3,
    "qwen3_layer_types_bias_tied": {
        **_QWEN3, "attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma_multi_query": {**_GEMMA, "num_key_value_heads": 1, "hidden_act": "gelu", "hidden_activation": None},
    "gemma_untied_bias": {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu"},
    "gemma2": {**_GEMMA2, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    "gemma2_no_caps_untied": {**_GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                              "tie_word_embeddings": False, "attention_bias": True,
                              "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "gemma3": {**_GEMMA3, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3_untied_softcap": {
        **{key: value for key, value in _GEMMA3.items() if not key.startswith("rope")}, "tie_word_embeddings": False,
        "final_logit_softcapping": 4.0, "num_key_value_heads": 1, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 40000.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 600.0}}},
    "olmo2": _OLMO2,
    "olmo2_multi_head_tied_bias": {**_OLMO2, "num_key_value_heads": None, "tie_word_embeddings": True,
                                   "attention_bias": True, "head_dim": 8},
    "gptj": _GPTJ,
    "gptj_all_rotary_inner": {**_GPTJ, "rotary_dim": 12, "n_inner": 56, "activation_function": "relu"},
    "bloom": _BLOOM,
    "bloom_six_heads_untied": {**_BLOOM, "n_head": 6, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    "bloom_older_names": {"model_type": "bloom", "vocab_size": 97, "n_embed": 40, "num_attention_heads": 5,
                          "num_hidden_layers": 2, "pretraining_tp": 4, "offset_alibi": 100, "seq_length": 64},
    "mpt": _MPT,
    "mpt_untied_scale": {**_MPT, "n_heads": 6, "tie_word_embeddings": False, "learned_pos_emb": False,
                         "attn_config": {"alibi_bias_max": 8, "softmax_scale": 0.2, "attn_impl": "flash"}},
    "phi": _PHI,
    "phi_grouped": {**_PHI, "num_key_value_heads": 2, "rope_theta": 500.0, "hidden_act": "relu2",
                    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.7}},
    "stablelm": _STABLELM,
    "stablelm_parallel_bias_tied": {**_STABLELM, "use_parallel_residual": True, "use_qkv_bias": True,
                                    "tie_word_embeddings": True},
    "starcoder2": _STARCODER2,
    "starcoder2_untied_no_bias": {**_STARCODER2, "tie_word_embeddings": False, "use_bias": False,
                                  "sliding_window": None, "num_key_value_heads": 4},
    "mixtral": _MIXTRAL,
    "mixtral_window_tied_one_expert": {**_MIXTRAL, "sliding_window": 11, "tie_word_embeddings": True, "head_dim": 16,
                                       "num_local_experts": 1, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.02},
    "qwen3_moe": {**_QWEN_MOE, "model_type": "qwen3_moe", "norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe_dense_layers_tied": {
        **_QWEN_MOE, "model_type": "qwen3_moe", "decoder_sparse_step": 2, "attention_bias": True,
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9},
    "qwen2_moe": {**_QWEN_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 32,
                  "mlp_only_layers": [1]},
    "olmoe": _OLMOE,
    "olmoe_tied_normalized": {**_OLMOE, "tie_word_embeddings": True, "norm_topk_prob": True, "attention_bias": True,
                              "num_key_value_heads": None},
}


def write_config(folder: Path, values: dict[str, Any]) -> str:
    """Write a config.json into `folder`. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)
