"""Llama and the families that resemble it: Mistral, OLMo-2, Qwen, StableLM and StarCoder2.

They have RMSNorm, rotary positions, grouped queries and a gated MLP. They differ in biases, in the places of the norms,
in attention windows, and in factors. gemma.py and experts.py have more of them.
"""

from dataclasses import replace
from typing import Any

from pretrain.errors import ConfigError
from pretrain.model.families.family import Family, Fields, Names, Values, separate_qkv
from pretrain.model.families.position_keys import LARGEST_LAYERS, read_rope, read_windows

KEYS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None, "attention_dropout": 0.0,
}
KEY_NAMES = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "activation": "hidden_act", "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps", "qkv_bias": "attention_bias", "attention_out_bias": "attention_bias",
}
FIELDS: Fields = {"norm": "rmsnorm", "gated_mlp": True, "position": "rope"}
BLOCK: dict[str, str | tuple[str, ...]] = {
    "norm1": "input_layernorm", "attention.qkv": separate_qkv("self_attn"), "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "attention.out": "self_attn.o_proj", "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}
# with norms of outputs; without them, "post_attention" means: before the MLP
BLOCK_WITH_POST_NORMS = {**BLOCK, "norm2": "pre_feedforward_layernorm", "post_norm1": "post_attention_layernorm",
                         "post_norm2": "post_feedforward_layernorm"}
NAMES = Names(prefix="model.", embedding="embed_tokens", blocks="layers", final_norm="norm", block=BLOCK)
NAMES_WITH_POST_NORMS = replace(NAMES, block=BLOCK_WITH_POST_NORMS)


def read_rotary(values: Values, fields: Fields, where: str) -> Fields:
    """Return the rotary fields."""
    return read_rope(values, where, theta_key="rope_theta", fraction_key=None, head_size=fields["head_size"])


# Llama 2 and 3
LLAMA = Family(keys={**KEYS, "attention_bias": False, "mlp_bias": False}, nullable=frozenset({"attention_dropout"}),
               fields=FIELDS, key_names=KEY_NAMES, read=read_rotary, names=NAMES)


def read_with_windows(values: Values, fields: Fields, where: str) -> Fields:
    """Return the rotary fields, and an attention window in all layers, or in none, or as layer_types says."""
    return {**read_rotary(values, fields, where), "windows": read_windows(values, where)}


MISTRAL = Family(
    keys={**KEYS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
          "sliding_window": 4096},
    nullable=frozenset({"sliding_window"}), fields=FIELDS, key_names=KEY_NAMES, read=read_with_windows, names=NAMES)

# OLMo-2: norms of the outputs of attention and MLP instead of their inputs, norms of queries and keys
OLMO2 = Family(keys={**KEYS, "vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}, key_names=KEY_NAMES,
               fields={**FIELDS, "pre_norm": False, "post_norm": True, "qk_norm": "all"}, read=read_rotary,
               names=NAMES_WITH_POST_NORMS)

_QWEN_KEYS: dict[str, Any] = {
    **KEYS, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}
_QWEN_NULLABLE = frozenset({"num_key_value_heads", "sliding_window"})


def _read_qwen(values: Values, fields: Fields, where: str) -> Fields:
    """Return the rotary fields, and the windows; only layers from `max_window_layers` on have one."""
    first = values["max_window_layers"]
    if not 0 <= first <= LARGEST_LAYERS:
        raise ConfigError(f"{where}: max_window_layers", found=first,
                          expected="the index of the first layer with a window, or the number of layers")
    return {**read_rotary(values, fields, where), "windows": read_windows(
        values, where, enabled=values["use_sliding_window"], slides=lambda index: index >= first)}


# Qwen2 and Qwen2.5: biases of queries, keys and values
QWEN2 = Family(keys=_QWEN_KEYS, nullable=_QWEN_NULLABLE, fixed={"use_mrope": False}, key_names=KEY_NAMES,
               fields={**FIELDS, "qkv_bias": True}, read=_read_qwen, names=NAMES)
# Qwen3: norms of queries and keys
QWEN3 = Family(keys={**_QWEN_KEYS, "head_dim": 128, "attention_bias": False}, nullable=_QWEN_NULLABLE,
               fields={**FIELDS, "qk_norm": "head"}, key_names=KEY_NAMES, read=_read_qwen, names=NAMES)


def _read_stablelm(values: Values, fields: Fields, where: str) -> Fields:
    rope = read_rope(values, where, theta_key="rope_theta", fraction_key="partial_rotary_factor",
                     head_size=fields["head_size"], default_fraction=0.25)
    return {**rope, "shared_norm": fields["parallel_residual"]}


# StableLM: LayerNorm, positions rotate a part of each head, and optionally a parallel residual
STABLELM = Family(
    keys={
        **{key: default for key, default in KEYS.items() if key not in ("head_dim", "rms_norm_eps")},
        "vocab_size": 50304, "intermediate_size": 6912, "hidden_size": 2560, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "use_qkv_bias": False,
        "use_parallel_residual": False, "partial_rotary_factor": None,
    },
    # transformers applies hidden_dropout to the output of the MLP only
    fixed={"qk_layernorm": False, "hidden_dropout": 0.0},
    fields={**FIELDS, "norm": "layernorm"},
    key_names={**KEY_NAMES, "norm_eps": "layer_norm_eps", "rotary_size": "partial_rotary_factor",
               "parallel_residual": "use_parallel_residual", "qkv_bias": "use_qkv_bias"},
    read=_read_stablelm, names=NAMES)

# StarCoder2: attention windows, LayerNorm, biases, an MLP without gate
STARCODER2 = Family(
    keys={
        **{key: default for key, default in KEYS.items() if key not in ("head_dim", "rms_norm_eps")},
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "initializer_range": 0.018042, "norm_epsilon": 1e-5, "sliding_window": None,
        "residual_dropout": 0.0, "embedding_dropout": 0.0, "use_bias": True, "tie_word_embeddings": True,
    },
    fixed={"mlp_type": "default", "norm_type": "layer_norm"},  # in published files; transformers has no others
    # activation_function and layer_norm_epsilon: in published files next to hidden_act and norm_epsilon, which
    # transformers uses instead
    ignored=frozenset({"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "activation_function",
                       "layer_norm_epsilon"}),
    fields={**FIELDS, "norm": "layernorm", "gated_mlp": False},
    key_names={**KEY_NAMES, "norm_eps": "norm_epsilon", "qkv_bias": "use_bias", "attention_out_bias": "use_bias",
               "mlp_bias": "use_bias"},
    read=read_with_windows, names=replace(NAMES, block={**BLOCK, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}))
