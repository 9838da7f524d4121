"""Gemma, Gemma 2 and the text models of Gemma 3.

All scale the embeddings by sqrt(hidden_size), and have norms that multiply by 1 + weight. Gemma 2 has post-norms,
soft-capping, and windows in every second layer. Gemma 3 has norms of queries and keys instead of soft-capping, and its
layers with a window have their own rope_theta.
"""

import json
import math
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.families.family import Family, Fields, Values, activation
from pretrain.model.families.llama_like import FIELDS, KEY_NAMES, KEYS, NAMES, NAMES_WITH_POST_NORMS, read_rotary
from pretrain.model.families.position_keys import LARGEST_LAYERS, read_rope, read_windows

_LARGEST_SCALAR, _LARGEST_CAP = 2**20, 1e6


def _embedding_scale(values: Values) -> float:
    return math.sqrt(max(values["hidden_size"], 0))


def _read_gemma(values: Values, fields: Fields, where: str) -> Fields:
    # the first published configs say "gelu" and mean the approximation, as transformers does
    name = "gelu_pytorch_tanh" if values["hidden_act"] == "gelu" else values["hidden_act"]
    _require_same(values, "hidden_activation", name, where)
    return {**read_rotary(values, fields, where), "embedding_scale": _embedding_scale(values),
            "activation": activation(name, f"{where}: hidden_act")}


def _read_gemma2(values: Values, fields: Fields, where: str) -> Fields:
    _require_same(values, "sliding_window_size", values["sliding_window"], where)
    return {**_newer_fields(values, where, pattern=2), **read_rotary(values, fields, where),
            "attention_softcap": _softcap(values, "attn_logit_softcapping", where)}


def _read_gemma3(values: Values, fields: Fields, where: str) -> Fields:
    pattern = values["sliding_window_pattern"]
    if not 0 < pattern <= LARGEST_LAYERS:
        raise ConfigError(f"{where}: sliding_window_pattern", found=pattern, expected="a number of layers above 0")
    return {**_newer_fields(values, where, pattern=pattern), **_two_ropes(values, where)}


def _newer_fields(values: Values, where: str, *, pattern: int) -> Fields:
    """Return the fields that Gemma 2 and 3 share. All layers but each `pattern`-th have a window."""
    scalar = values["query_pre_attn_scalar"]
    if not 0 < scalar <= _LARGEST_SCALAR:
        raise ConfigError(f"{where}: query_pre_attn_scalar", found=scalar, expected=f"1 to {_LARGEST_SCALAR:,}")
    _require_same(values, "hidden_act", values["hidden_activation"], where)
    return {"attention_scale": scalar**-0.5, "logit_softcap": _softcap(values, "final_logit_softcapping", where),
            "embedding_scale": _embedding_scale(values),
            "windows": read_windows(values, where, slides=lambda index: (index + 1) % pattern != 0)}


def _softcap(values: Values, key: str, where: str) -> float:
    """Return the cap of a key; 0.0 for null."""
    cap = values[key]
    if cap is not None and not 0 < cap <= _LARGEST_CAP:
        raise ConfigError(f"{where}: {key}", found=cap,
                          expected=f"a number above 0, up to {_LARGEST_CAP:g}, or null for no cap")
    return float(cap or 0.0)


def _require_same(values: Values, key: str, expected: Any, where: str) -> None:
    """Raise ConfigError if a published key that transformers ignores contradicts the key that it uses."""
    if values[key] not in (None, expected):
        raise ConfigError(f"{where}: {key}", found=json.dumps(values[key]), expected=json.dumps(expected),
                          remedy="Remove the key")


def _two_ropes(values: Values, where: str) -> Fields:
    """Return the rotary fields of Gemma 3, from rope_theta and rope_local_base_freq or the nested rope_parameters."""
    nested = values["rope_parameters"] or {}
    if nested and values["rope_scaling"]:
        raise ConfigError(f"{where}: rope_scaling", problem="the config also has rope_parameters",
                          remedy="keep one of them")
    for name, value in nested.items():
        if name not in ("full_attention", "sliding_attention") or not isinstance(value, dict | None):
            raise ConfigError(f"{where}: rope_parameters.{shorten(name)}", found=shorten(json.dumps(value)),
                              expected="an object for full_attention, and one for sliding_attention")
    size, local = values["head_dim"], nested.get("sliding_attention")
    fields = read_rope({**values, "rope_parameters": nested.get("full_attention")}, where, theta_key="rope_theta",
                       fraction_key=None, head_size=size)
    of_local = read_rope({**values, "rope_theta": None, "rope_scaling": None, "rope_parameters": local}, where,
                         theta_key="rope_local_base_freq", fraction_key=None, head_size=size)
    if of_local["rope_scaling"]:
        raise ConfigError(f"{where}: rope_parameters.sliding_attention.rope_type",
                          found=json.dumps(of_local["rope_scaling"]["rope_type"]),
                          expected='"default" (nothing else is implemented)')
    return {**fields, "local_rope_theta": of_local["rope_theta"]}


_GEMMA: dict[str, Any] = {
    **KEYS, "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None, "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False,
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "sliding_window_size": None, "layer_types": None, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3: dict[str, Any] = {
    **{key: value for key, value in _GEMMA2.items() if key not in ("attn_logit_softcapping", "sliding_window_size")},
    "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6, "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0, "final_logit_softcapping": None,
}
_NULLABLE = frozenset({"attention_dropout", "final_logit_softcapping"})
_FIXED = {"use_bidirectional_attention": False}
_NEWER_NAMES = {**KEY_NAMES, "activation": "hidden_activation", "logit_softcap": "final_logit_softcapping",
                "attention_softcap": "attn_logit_softcapping"}

_FIELDS: Fields = {**FIELDS, "norm_offset": 1.0}

GEMMA = Family(
    keys=_GEMMA, fixed=_FIXED, fields=_FIELDS, key_names=KEY_NAMES, read=_read_gemma, names=NAMES)
GEMMA2 = Family(
    keys=_GEMMA2, nullable=_NULLABLE | {"attn_logit_softcapping"}, fixed=_FIXED, fields={**_FIELDS, "post_norm": True},
    key_names=_NEWER_NAMES, read=_read_gemma2, names=NAMES_WITH_POST_NORMS)
# transformers 5.23 ignores attn_logit_softcapping of Gemma 3 (models/gemma3/modeling_gemma3.py, Gemma3Attention)
GEMMA3 = Family(
    keys=_GEMMA3, nullable=_NULLABLE, fixed={**_FIXED, "attn_logit_softcapping": None},
    fields={**_FIELDS, "post_norm": True, "qk_norm": "head"}, key_names=_NEWER_NAMES, read=_read_gemma3,
    names=NAMES_WITH_POST_NORMS)
