"""Sizes of models that this project does not train, read from a transformers config.json.

There is one reader for each model_type. It returns the fields of a ModelShape. Keys that the config.json omits get the
defaults of transformers' configuration classes (tests/memory/estimate/test_model_shape.py compares parameter counts).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pretrain.errors import ConfigError

Values = Mapping[str, Any]
_MAX_LAYERS, _MAX_SIZE = 10**5, 2**31 - 1


def _read(values: Values, key: str, default: Any) -> Any:
    """Return a value of the default's type (an integer if the default is None), or the default if there is no value.

    Raises ConfigError for a value of another type.
    """
    value = values.get(key)
    if value is None:
        return default
    if isinstance(default, (bool, str, list)):
        if not isinstance(value, type(default)):
            names = {bool: "true or false", str: "a string", list: "a list"}
            raise ConfigError(key, found=json.dumps(value), expected=names[type(default)])
    elif isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ConfigError(key, found=json.dumps(value), expected="a number from 0 to 1")
    else:
        return _require(values, key)
    return value


def _require(values: Values, key: str) -> int:
    """Return a positive integer. Raises ConfigError for anything else."""
    value = values.get(key)
    largest = _MAX_LAYERS if "layer" in key else _MAX_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
        raise ConfigError(key, found="nothing" if value is None else json.dumps(value),
                          expected=f"a whole number from 1 to {largest}")
    return value


def _llama_like(values: Values, *, tied: bool = False, head_size: int | None = None, kv_heads: int | None = None,
                **fields: Any) -> dict[str, Any]:
    """Read an architecture with Llama's keys: hidden_size, num_hidden_layers, num_attention_heads, ...

    Args:
        tied, head_size, kv_heads: defaults of the architecture.
        fields: fields of ModelShape that the architecture fixes.
    """
    hidden, heads = _require(values, "hidden_size"), _require(values, "num_attention_heads")
    head_size = _read(values, "head_dim", head_size or hidden // heads)
    rotary_fraction = _read(values, "partial_rotary_factor", 1.0)
    return {
        "vocab_size": _require(values, "vocab_size"), "hidden_size": hidden,
        "num_layers": _require(values, "num_hidden_layers"), "num_heads": heads,
        "num_kv_heads": _read(values, "num_key_value_heads", kv_heads or heads), "head_size": head_size,
        "intermediate_size": _require(values, "intermediate_size"),
        "max_positions": _read(values, "max_position_embeddings", 2048),
        "rotary_size": int(head_size * rotary_fraction),
        "qkv_bias": bool(_read(values, "attention_bias", False)),
        "attention_out_bias": bool(_read(values, "attention_bias", False)),
        "mlp_bias": bool(_read(values, "mlp_bias", False)),
        "tie_word_embeddings": bool(_read(values, "tie_word_embeddings", tied)),
        "attention_dropout": float(_read(values, "attention_dropout", 0.0)), **fields}


def _cohere(values: Values) -> dict[str, Any]:
    return _llama_like(values, tied=True, shared_norm=True, parallel_residual=True)


def _opt(values: Values) -> dict[str, Any]:
    hidden, heads = _require(values, "hidden_size"), _require(values, "num_attention_heads")
    if _read(values, "word_embed_proj_dim", hidden) != hidden:
        raise ConfigError("word_embed_proj_dim", found=values["word_embed_proj_dim"], expected=f"hidden_size, {hidden}")
    positions = _read(values, "max_position_embeddings", 2048)
    bias = bool(_read(values, "enable_bias", True))
    return {**_gpt2_like(values, hidden, _require(values, "num_hidden_layers"), heads, heads, positions),
            "intermediate_size": _require(values, "ffn_dim"), "position_rows": positions + 2, "qkv_bias": bias,
            "attention_out_bias": bias, "mlp_bias": bias}


def _gpt2_like(values: Values, hidden: int, layers: int, heads: int, kv_heads: int, positions: int) -> dict[str, Any]:
    """Return the fields of architectures like GPT-2: learned positions, LayerNorm, biases, no gate, a tied head."""
    return {"vocab_size": _require(values, "vocab_size"), "hidden_size": hidden, "num_layers": layers,
            "num_heads": heads, "num_kv_heads": kv_heads, "head_size": hidden // heads, "intermediate_size": 4 * hidden,
            "max_positions": positions, "gated_mlp": False, "norm": "layernorm",
            "position": "learned", "position_rows": positions, "qkv_bias": True, "attention_out_bias": True,
            "mlp_bias": True, "tie_word_embeddings": bool(_read(values, "tie_word_embeddings", True))}


def _gpt_bigcode(values: Values) -> dict[str, Any]:
    hidden, heads = _require(values, "n_embd"), _require(values, "n_head")
    kv_heads = 1 if _read(values, "multi_query", True) else heads
    positions = _read(values, "n_positions", 1024)
    fields = _gpt2_like(values, hidden, _require(values, "n_layer"), heads, kv_heads, positions)
    return {**fields, "intermediate_size": _read(values, "n_inner", 4 * hidden)}


def _falcon(values: Values) -> dict[str, Any]:
    hidden, heads = _require(values, "hidden_size"), _require(values, "num_attention_heads")
    newer, bias = bool(_read(values, "new_decoder_architecture", False)), bool(_read(values, "bias", False))
    kv_heads = _read(values, "num_kv_heads", heads) if newer else 1 if _read(values, "multi_query", True) else heads
    parallel, rope = newer or bool(_read(values, "parallel_attn", True)), not _read(values, "alibi", False)
    fields = _gpt2_like(values, hidden, _require(values, "num_hidden_layers"), heads, kv_heads,
                      _read(values, "max_position_embeddings", 2048))
    norms = _read(values, "num_ln_in_parallel_attn", 2 if newer else 1) if parallel else 2
    return {**fields, "intermediate_size": _read(values, "ffn_hidden_size", 4 * hidden), "position_rows": 0,
            "position": "rope" if rope else "alibi", "rotary_size": hidden // heads if rope else 0,
            "parallel_residual": parallel, "shared_norm": norms == 1, "qkv_bias": bias, "attention_out_bias": bias,
            "mlp_bias": bias}


ARCHITECTURES: dict[str, Callable[[Values], dict[str, Any]]] = {
    "granite": _llama_like, "smollm3": lambda values: _llama_like(values, tied=True, kv_heads=4), "phi3": _llama_like,
    "olmo": lambda values: _llama_like(values, norm="none"),
    "cohere": _cohere, "opt": _opt, "gpt_bigcode": _gpt_bigcode, "falcon": _falcon,
}
