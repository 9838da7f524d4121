"""Sizes of models that this project does not train, from their config.json: transformers' words and defaults.

Each reader returns fields of ModelShape. What a config.json leaves out has transformers' own default.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pretrain.errors import ConfigError

Values = Mapping[str, Any]
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}


_MOST_LAYERS, _MOST = 10**5, 2**31 - 1


def _read(values: Values, key: str, default: Any) -> Any:
    """A value of the default's type (a whole number, where that is None), or the default. Raises ConfigError."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(default, (bool, str, list)):
        if not isinstance(value, type(default)):
            kinds = {bool: "true or false", str: "a string", list: "a list"}
            raise ConfigError(key, found=json.dumps(value), expected=kinds[type(default)])
    elif isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ConfigError(key, found=json.dumps(value), expected="a number from 0 to 1")
    else:
        return _need(values, key)
    return value


def _need(values: Values, key: str) -> int:
    value = values.get(key)
    most = _MOST_LAYERS if "layer" in key else _MOST
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ConfigError(key, found="nothing" if value is None else json.dumps(value),
                          expected=f"a whole number from 1 to {most}")
    return value


def _activation(values: Values, key: str, default: str) -> str:
    name = str(_read(values, key, default))
    return _ACTIVATIONS.get(name, name)


def _llama_like(values: Values, *, tied: bool = False, head_size: int | None = None, kv_heads: int | None = None,
                **choices: Any) -> dict[str, Any]:
    """Whatever has Llama's words: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads ..."""
    hidden, heads = _need(values, "hidden_size"), _need(values, "num_attention_heads")
    head_size = _read(values, "head_dim", head_size or hidden // heads)
    share = _read(values, "partial_rotary_factor", 1.0)
    return {
        "vocab_size": _need(values, "vocab_size"), "hidden_size": hidden,
        "num_layers": _need(values, "num_hidden_layers"), "num_heads": heads,
        "num_kv_heads": _read(values, "num_key_value_heads", kv_heads or heads), "head_size": head_size,
        "intermediate_size": _need(values, "intermediate_size"),
        "max_positions": _read(values, "max_position_embeddings", 2048),
        "activation": _activation(values, "hidden_act", "silu"), "rotary_size": int(head_size * share),
        "qkv_bias": bool(_read(values, "attention_bias", False)),
        "attention_out_bias": bool(_read(values, "attention_bias", False)),
        "mlp_bias": bool(_read(values, "mlp_bias", False)),
        "tie_word_embeddings": bool(_read(values, "tie_word_embeddings", tied)),
        "attention_dropout": float(_read(values, "attention_dropout", 0.0)), **choices}


def _mixtral(values: Values) -> dict[str, Any]:
    return _llama_like(values, kv_heads=8, num_experts=_read(values, "num_local_experts", 8),
                       experts_per_token=_read(values, "num_experts_per_tok", 2),
                       moe_intermediate_size=_need(values, "intermediate_size"))


def _qwen2(values: Values) -> dict[str, Any]:
    return _llama_like(values, qkv_bias=True, attention_out_bias=False)


def _qwen3(values: Values, **choices: Any) -> dict[str, Any]:
    head_size = _read(values, "head_dim", 128)
    return _llama_like(values, head_size=head_size, qk_norm_size=2 * head_size, **choices)


def _sparse(values: Values, moe_default: int, experts_default: int, chosen_default: int) -> dict[str, Any]:
    """Qwen's experts: every decoder_sparse_step-th block but those in mlp_only_layers."""
    step = _read(values, "decoder_sparse_step", 1)
    only = set(_read(values, "mlp_only_layers", []))
    dense = {index for index in range(_need(values, "num_hidden_layers")) if index in only or (index + 1) % step}
    return {"num_experts": _read(values, "num_experts", _read(values, "num_local_experts", experts_default)),
            "experts_per_token": _read(values, "num_experts_per_tok", chosen_default),
            "moe_intermediate_size": _read(values, "moe_intermediate_size", moe_default),
            "dense_layers": frozenset(dense)}


def _qwen2_moe(values: Values) -> dict[str, Any]:
    return _llama_like(values, qkv_bias=bool(_read(values, "qkv_bias", True)), attention_out_bias=False,
                       shared_expert_size=_read(values, "shared_expert_intermediate_size", 5632),
                       shared_expert_gate=True, **_sparse(values, 1408, 60, 4))


def _qwen3_moe(values: Values) -> dict[str, Any]:
    return {**_qwen3({"head_dim": _need(values, "hidden_size") // _need(values, "num_attention_heads"), **values}),
            **_sparse(values, 768, 128, 8)}


def _gemma(values: Values, norms: int = 2, qk_norm: bool = False) -> dict[str, Any]:
    head_size = _read(values, "head_dim", 256)
    kind = _activation(values, "hidden_activation", str(_read(values, "hidden_act", "gelu_pytorch_tanh")))
    return _llama_like(values, tied=True, head_size=head_size, norms_per_block=norms, activation=kind,
                       qk_norm_size=2 * head_size if qk_norm else 0)


def _olmo2(values: Values) -> dict[str, Any]:
    shape = _llama_like(values)
    return {**shape, "qk_norm_size": (shape["num_heads"] + shape["num_kv_heads"]) * shape["head_size"]}


def _phi(values: Values) -> dict[str, Any]:
    return _llama_like({"partial_rotary_factor": 0.5, **values}, norm="layernorm", norms_per_block=1, qkv_bias=True,
                       attention_out_bias=True, mlp_bias=True, head_bias=True, parallel_residual=True,
                       gated_mlp=False, activation=_activation(values, "hidden_act", "gelu_new"))


def _stablelm(values: Values) -> dict[str, Any]:
    return _llama_like({"partial_rotary_factor": 0.25, **values}, norm="layernorm",
                       qkv_bias=bool(_read(values, "use_qkv_bias", False)), attention_out_bias=False)


def _starcoder2(values: Values) -> dict[str, Any]:
    bias = bool(_read(values, "use_bias", True))
    return _llama_like(values, tied=True, kv_heads=2, norm="layernorm", gated_mlp=False, qkv_bias=bias,
                       attention_out_bias=bias, mlp_bias=bias,
                       activation=_activation(values, "hidden_act", "gelu_pytorch_tanh"))


def _cohere(values: Values) -> dict[str, Any]:
    return _llama_like(values, tied=True, norms_per_block=1, parallel_residual=True)


def _opt(values: Values) -> dict[str, Any]:
    hidden, heads = _need(values, "hidden_size"), _need(values, "num_attention_heads")
    if _read(values, "word_embed_proj_dim", hidden) != hidden:
        raise ConfigError("word_embed_proj_dim", found=values["word_embed_proj_dim"], expected=f"hidden_size, {hidden}")
    positions = _read(values, "max_position_embeddings", 2048)
    bias = bool(_read(values, "enable_bias", True))
    return {**_learned(values, hidden, _need(values, "num_hidden_layers"), heads, heads, positions),
            "intermediate_size": _need(values, "ffn_dim"), "position_rows": positions + 2, "qkv_bias": bias,
            "attention_out_bias": bias, "mlp_bias": bias,
            "activation": _activation(values, "activation_function", "relu")}


def _learned(values: Values, hidden: int, layers: int, heads: int, kv_heads: int, positions: int) -> dict[str, Any]:
    """GPT-2's kin: LayerNorm, biases everywhere, no gate, a tied head."""
    return {"vocab_size": _need(values, "vocab_size"), "hidden_size": hidden, "num_layers": layers, "num_heads": heads,
            "num_kv_heads": kv_heads, "head_size": hidden // heads, "intermediate_size": 4 * hidden,
            "max_positions": positions, "activation": "gelu_tanh", "gated_mlp": False, "norm": "layernorm",
            "position": "learned", "position_rows": positions, "qkv_bias": True, "attention_out_bias": True,
            "mlp_bias": True, "tie_word_embeddings": bool(_read(values, "tie_word_embeddings", True))}


def _gpt_bigcode(values: Values) -> dict[str, Any]:
    hidden, heads = _need(values, "n_embd"), _need(values, "n_head")
    kv_heads = 1 if _read(values, "multi_query", True) else heads
    fields = _learned(values, hidden, _need(values, "n_layer"), heads, kv_heads, _read(values, "n_positions", 1024))
    return {**fields, "intermediate_size": _read(values, "n_inner", 4 * hidden)}


def _bloom(values: Values) -> dict[str, Any]:
    hidden = _read(values, "hidden_size", None) or _need(values, "n_embed")
    layers = _read(values, "n_layer", None) or _need(values, "num_hidden_layers")
    heads = _read(values, "n_head", None) or _need(values, "num_attention_heads")
    fields = _learned(values, hidden, layers, heads, heads, _read(values, "seq_length", 2048))
    return {**fields, "position": "none", "position_rows": 0, "embedding_norm": True}


def _gptj(values: Values) -> dict[str, Any]:
    hidden, heads = _need(values, "n_embd"), _need(values, "n_head")
    fields = _learned(values, hidden, _need(values, "n_layer"), heads, heads, _read(values, "n_positions", 2048))
    return {**fields, "intermediate_size": _read(values, "n_inner", 4 * hidden), "position": "rope",
            "position_rows": 0, "rotary_size": _read(values, "rotary_dim", 64), "norms_per_block": 1,
            "parallel_residual": True, "qkv_bias": False, "attention_out_bias": False, "head_bias": True,
            "tie_word_embeddings": bool(_read(values, "tie_word_embeddings", False))}


def _falcon(values: Values) -> dict[str, Any]:
    hidden, heads = _need(values, "hidden_size"), _need(values, "num_attention_heads")
    newer, bias = bool(_read(values, "new_decoder_architecture", False)), bool(_read(values, "bias", False))
    kv_heads = _read(values, "num_kv_heads", heads) if newer else 1 if _read(values, "multi_query", True) else heads
    parallel, rope = newer or bool(_read(values, "parallel_attn", True)), not _read(values, "alibi", False)
    fields = _learned(values, hidden, _need(values, "num_hidden_layers"), heads, kv_heads,
                      _read(values, "max_position_embeddings", 2048))
    norms = _read(values, "num_ln_in_parallel_attn", 2 if newer else 1) if parallel else 2
    return {**fields, "intermediate_size": _read(values, "ffn_hidden_size", 4 * hidden), "position_rows": 0,
            "position": "rope" if rope else "none", "rotary_size": hidden // heads if rope else 0,
            "parallel_residual": parallel, "norms_per_block": norms, "qkv_bias": bias, "attention_out_bias": bias,
            "mlp_bias": bias, "activation": "gelu"}


ARCHITECTURES: dict[str, Callable[[Values], dict[str, Any]]] = {
    "mistral": lambda values: _llama_like(values, kv_heads=8), "granite": _llama_like,
    "smollm3": lambda values: _llama_like(values, tied=True, kv_heads=4), "phi3": _llama_like, "mixtral": _mixtral,
    "qwen2": _qwen2, "qwen2_moe": _qwen2_moe, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "gemma": _gemma,
    "gemma2": lambda values: _gemma(values, 4), "gemma3_text": lambda values: _gemma(values, 4, True),
    "olmo": lambda values: _llama_like(values, norm="none"), "olmo2": _olmo2, "phi": _phi, "stablelm": _stablelm,
    "starcoder2": _starcoder2, "cohere": _cohere, "opt": _opt, "gpt_bigcode": _gpt_bigcode, "bloom": _bloom,
    "gptj": _gptj, "falcon": _falcon,
}
