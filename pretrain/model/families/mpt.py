"""MPT: ALiBi instead of positions, LayerNorm without bias, no biases, and settings of the attention in `attn_config`.

Dropouts act where their names say. (The model of transformers applies attn_pdrop to the residual stream as well, and
ignores resid_pdrop and emb_pdrop. This makes no difference outside training.)
"""

import json
import math
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.families.family import Family, Fields, Names, Values, listing

_NUMBERS = {"attn_pdrop": 0.0, "softmax_scale": None}  # keys of attn_config that are used
# Keys of attn_config for which only this value is implemented. transformers 5.23 ignores other values of most of them
# (models/mpt/modeling_mpt.py: alibi_bias_max is never passed on), so that an exported model would be another one.
_FIXED = {"attn_type": "multihead_attention", "clip_qkv": None, "prefix_lm": False, "qk_ln": False,
          "attn_uses_sequence_id": False, "alibi": True, "alibi_bias_max": 8}
_IMPLEMENTATIONS = ("flash", "torch", "triton")  # values of attn_impl, which compute the same
# keys that transformers writes into every configuration
_WRITTEN = frozenset({"architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id",
                      "model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
                      "torch_dtype", "transformers_version"})


def _read_attention(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the checked numbers in `attn_config`."""
    for key, value in given.items():
        if key in _FIXED and (value != _FIXED[key] or isinstance(value, bool) != isinstance(_FIXED[key], bool)):
            raise ConfigError(f"{where}.{key}", found=json.dumps(value),
                              expected=f"{json.dumps(_FIXED[key])} (nothing else is implemented)")
        if key == "attn_impl" and value not in _IMPLEMENTATIONS:
            raise ConfigError(f"{where}.{key}", found=json.dumps(value), expected=f"one of {listing(_IMPLEMENTATIONS)}")
        if key not in {*_NUMBERS, *_FIXED, *_WRITTEN, "attn_impl"} and not key.startswith("_"):
            known = (*_NUMBERS, *_FIXED, "attn_impl")
            raise ConfigError(f"{where}.{shorten(key)}", problem="this is not a key of attn_config", word=key,
                              known=known, remedy=f"its keys are {listing(known)}")
    numbers = {key: default if given.get(key) is None else given[key] for key, default in _NUMBERS.items()}
    for key, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(f"{where}.{key}", found=json.dumps(value), expected="a number, not negative")
        if key == "softmax_scale" and value == 0:
            raise ConfigError(f"{where}.{key}", found=json.dumps(value), expected="a number above 0")
    return numbers


def _check_norm_type(norm_type: str, where: str) -> None:
    if norm_type not in ("layernorm", "low_precision_layernorm"):
        raise ConfigError(f"{where}: norm_type", found=json.dumps(norm_type),
                          expected='"layernorm" or "low_precision_layernorm" (nothing else is implemented)')


def _read(values: Values, fields: Fields, where: str) -> Fields:
    attention = _read_attention(values["attn_config"] or {}, f"{where}: attn_config")
    _check_norm_type(values["norm_type"], where)
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
    read=_read,
    names=Names(prefix="transformer.", embedding="wte", blocks="blocks", final_norm="norm_f",
                block={"norm1": "norm_1", "attention.qkv": "attn.Wqkv", "attention.out": "attn.out_proj",
                       "norm2": "norm_2", "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj"}))
