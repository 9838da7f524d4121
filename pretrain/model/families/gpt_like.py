"""GPT-2 and the families that resemble it: GPT-J, GPT-NeoX, Phi, BLOOM and MPT. They have LayerNorm, and no gate."""

import json
import math
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.families.family import Family, Fields, Names, Values, listing, separate_qkv
from pretrain.model.families.position_keys import read_rope

_FIELDS: Fields = {"norm": "layernorm", "gated_mlp": False, "mlp_bias": True}
_WITH_BIASES: Fields = {**_FIELDS, "qkv_bias": True, "attention_out_bias": True}
_GPT2_KEY_NAMES = {
    "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "max_positions": "n_positions",
    "intermediate_size": "n_inner", "activation": "activation_function", "norm_eps": "layer_norm_epsilon",
    "embedding_dropout": "embd_pdrop", "residual_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop",
}
# GPT-2: learned positions, biases everywhere
GPT2 = Family(
    keys={
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
    },
    fields={**_WITH_BIASES, "position": "learned", "scale_residual_init": True}, key_names=_GPT2_KEY_NAMES,
    # keys in the published configs of GPT-2 medium, large and XL; transformers does not use them
    ignored=frozenset({"n_special", "predict_special_tokens", "output_past"}),
    names=Names(
        prefix="transformer.", embedding="wte", positions="wpe", blocks="h", final_norm="ln_f", transposed=True,
        block={"norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "norm2": "ln_2",
               "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}))

# GPT-J: attention and MLP share one norm, positions rotate a part of each head, a bias of the head.
# transformers rotates pairs of neighbouring elements of a head (models/gptj/modeling_gptj.py, rotate_every_two), and
# this project the elements i and i + rotary_size / 2. So the rows of the query and key matrices are reordered.
GPTJ = Family(
    keys={
        "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
        "n_inner": None, "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
    },
    fields={**_FIELDS, "position": "rope", "rope_theta": 10000.0, "parallel_residual": True, "shared_norm": True,
            "head_bias": True},
    # a tied matrix would be shared with the embedding, which has no bias
    fixed={"rotary": True, "tie_word_embeddings": False}, key_names={**_GPT2_KEY_NAMES, "rotary_size": "rotary_dim"},
    names=Names(
        prefix="transformer.", embedding="wte", blocks="h", final_norm="ln_f", qkv_row_order="rotary_neighbours",
        block={"norm1": "ln_1", "attention.qkv": separate_qkv("attn"), "attention.out": "attn.out_proj",
               "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out"}))

_NEOX_KEY_NAMES = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "activation": "hidden_act",
    "max_positions": "max_position_embeddings", "norm_eps": "layer_norm_eps",
}


def _read_gpt_neox(values: Values, fields: Fields, where: str) -> Fields:
    return read_rope(values, where, theta_key="rotary_emb_base", fraction_key="rotary_pct",
                     head_size=fields["head_size"])


# GPT-NeoX and Pythia: parallel residual, positions rotate a part of each head
GPT_NEOX = Family(
    keys={
        "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 10000.0,
        "partial_rotary_factor": None, "rope_theta": None, "rope_scaling": None, "rope_parameters": None,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "max_position_embeddings": 2048,
        "initializer_range": 0.02, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True,
    },
    fields={**_FIELDS, "position": "rope"}, read=_read_gpt_neox,
    # older names of the dropouts, in the published config of GPT-NeoX-20B; transformers does not use them
    fixed={"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    key_names={
        **_NEOX_KEY_NAMES, "rotary_size": "rotary_pct", "embedding_dropout": "hidden_dropout",
        "residual_dropout": "hidden_dropout", "parallel_residual": "use_parallel_residual",
        "qkv_bias": "attention_bias", "attention_out_bias": "attention_bias",
    },
    names=Names(
        prefix="gpt_neox.", embedding="embed_in", blocks="layers", final_norm="final_layer_norm",
        head_in_files="embed_out", qkv_row_order="head_major",
        block={"norm1": "input_layernorm", "attention.qkv": "attention.query_key_value",
               "attention.out": "attention.dense", "norm2": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h",
               "mlp.down": "mlp.dense_4h_to_h"}))


def _read_phi(values: Values, fields: Fields, where: str) -> Fields:
    return read_rope(values, where, theta_key="rope_theta", fraction_key="partial_rotary_factor",
                     head_size=fields["head_size"], default_fraction=0.5)


# Phi 1, 1.5 and 2: attention and MLP share one norm, positions rotate a part of each head
PHI = Family(
    keys={
        "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attention_dropout": 0.0, "hidden_act": "gelu_new", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
        "rope_parameters": None, "partial_rotary_factor": None,
    },
    fields={**_WITH_BIASES, "position": "rope", "parallel_residual": True, "shared_norm": True, "head_bias": True},
    read=_read_phi,
    # a tied matrix would be shared with the embedding, which has no bias
    fixed={"qk_layernorm": False, "tie_word_embeddings": False}, nullable=frozenset({"attention_dropout"}),
    key_names={**_NEOX_KEY_NAMES, "num_kv_heads": "num_key_value_heads", "rotary_size": "partial_rotary_factor",
               "embedding_dropout": "embd_pdrop", "residual_dropout": "resid_pdrop"},
    names=Names(
        prefix="model.", embedding="embed_tokens", blocks="layers", final_norm="final_layernorm",
        block={"norm1": "input_layernorm", "attention.qkv": separate_qkv("self_attn"),
               "attention.out": "self_attn.dense", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}))

# BLOOM: ALiBi instead of positions, a norm after the embedding
BLOOM = Family(
    keys={
        "vocab_size": 250880, "hidden_size": None, "n_layer": None, "n_head": None, "n_embed": None,
        "num_attention_heads": None, "num_hidden_layers": None, "seq_length": 2048, "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True,
    },
    older_keys={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    fields={**_WITH_BIASES, "hidden_size": 64, "num_heads": 8, "num_layers": 2, "activation": "gelu_tanh",
            "position": "alibi", "embedding_norm": True},
    fixed={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False, "n_inner": None},
    # settings of the program that trained BLOOM; pretraining_tp matters with slow_but_exact only
    ignored=frozenset({"pretraining_tp", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion",
                       "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "unk_token_id"}),
    key_names={
        "num_layers": "n_layer", "num_heads": "n_head", "norm_eps": "layer_norm_epsilon",
        "residual_dropout": "hidden_dropout", "max_positions": "seq_length",
    },
    names=Names(
        prefix="transformer.", embedding="word_embeddings", blocks="h", final_norm="ln_f",
        embedding_norm="word_embeddings_layernorm", qkv_row_order="head_major",
        block={"norm1": "input_layernorm", "attention.qkv": "self_attention.query_key_value",
               "attention.out": "self_attention.dense", "norm2": "post_attention_layernorm",
               "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}))

# MPT: ALiBi instead of positions, no biases, and settings of the attention in `attn_config`. Dropouts act where their
# names say. (The model of transformers applies attn_pdrop to the residual stream as well, and ignores resid_pdrop and
# emb_pdrop. This makes no difference outside training.)
_MPT_NUMBERS = {"attn_pdrop": 0.0, "softmax_scale": None}  # keys of attn_config that are used
# Keys of attn_config for which only this value is implemented. transformers 5.23 ignores other values of most of them
# (models/mpt/modeling_mpt.py: alibi_bias_max is never passed on), so that an exported model would be another one.
_MPT_FIXED = {"attn_type": "multihead_attention", "clip_qkv": None, "prefix_lm": False, "qk_ln": False,
          "attn_uses_sequence_id": False, "alibi": True, "alibi_bias_max": 8}
_IMPLEMENTATIONS = ("flash", "torch", "triton")  # values of attn_impl, which compute the same
# keys that transformers writes into every configuration
_WRITTEN = frozenset({"architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id",
                      "model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
                      "torch_dtype", "transformers_version"})


def _read_mpt_attention(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the checked numbers in `attn_config`."""
    for key, value in given.items():
        if key in _MPT_FIXED:
            fixed = _MPT_FIXED[key]
            if value != fixed or isinstance(value, bool) != isinstance(fixed, bool):
                raise ConfigError(f"{where}.{key}", found=json.dumps(value),
                                  expected=f"{json.dumps(fixed)} (nothing else is implemented)")
        if key == "attn_impl" and value not in _IMPLEMENTATIONS:
            raise ConfigError(f"{where}.{key}", found=json.dumps(value), expected=f"one of {listing(_IMPLEMENTATIONS)}")
        if key not in {*_MPT_NUMBERS, *_MPT_FIXED, *_WRITTEN, "attn_impl"} and not key.startswith("_"):
            known = (*_MPT_NUMBERS, *_MPT_FIXED, "attn_impl")
            raise ConfigError(f"{where}.{shorten(key)}", problem="this is not a key of attn_config", word=key,
                              known=known, remedy=f"its keys are {listing(known)}")
    numbers = {key: default if given.get(key) is None else given[key] for key, default in _MPT_NUMBERS.items()}
    for key, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(f"{where}.{key}", found=json.dumps(value), expected="a number, not negative")
        if key == "softmax_scale" and value == 0:
            raise ConfigError(f"{where}.{key}", found=json.dumps(value), expected="a number above 0")
    return numbers


def _check_mpt_norm(norm_type: str, where: str) -> None:
    if norm_type not in ("layernorm", "low_precision_layernorm"):
        raise ConfigError(f"{where}: norm_type", found=json.dumps(norm_type),
                          expected='"layernorm" or "low_precision_layernorm" (nothing else is implemented)')


def _read_mpt(values: Values, fields: Fields, where: str) -> Fields:
    attention = _read_mpt_attention(values["attn_config"] or {}, f"{where}: attn_config")
    _check_mpt_norm(values["norm_type"], where)
    return {"attention_scale": attention["softmax_scale"] or 0.0, "attention_dropout": attention["attn_pdrop"]}


MPT = Family(
    keys={
        "vocab_size": 50368, "d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048, "attn_config": None,
        "resid_pdrop": 0.0, "emb_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": True, "norm_type": "low_precision_layernorm",
    },
    # transformers ignores another expansion_ratio, logit_scale, no_bias and embedding_fraction
    fixed={"expansion_ratio": 4, "logit_scale": None, "no_bias": True, "embedding_fraction": 1.0},
    # learned_pos_emb has no effect with ALiBi
    ignored=frozenset({"learned_pos_emb", "init_device", "init_config", "verbose", "tokenizer_name",
                       "auto_map"}),
    key_names={
        "hidden_size": "d_model", "num_layers": "n_layers", "num_heads": "n_heads", "max_positions": "max_seq_len",
        "norm_eps": "layer_norm_epsilon", "embedding_dropout": "emb_pdrop", "residual_dropout": "resid_pdrop",
        "attention_dropout": "attn_config.attn_pdrop",
    },
    fields={"norm": "layernorm", "norm_bias": False, "activation": "gelu", "gated_mlp": False, "position": "alibi"},
    read=_read_mpt,
    names=Names(prefix="transformer.", embedding="wte", blocks="blocks", final_norm="norm_f",
                block={"norm1": "norm_1", "attention.qkv": "attn.Wqkv", "attention.out": "attn.out_proj",
                       "norm2": "norm_2", "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj"}))
