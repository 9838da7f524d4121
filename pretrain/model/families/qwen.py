"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values. Qwen3: with norms of queries and keys instead."""

from typing import Any

from pretrain.errors import ConfigError
from pretrain.model.families.family import Family, Values
from pretrain.model.families.llama_like import KEY_NAMES, KEYS, llama_like_tensors, read_llama_like
from pretrain.model.families.windows import LARGEST_LAYERS, read_windows

_KEYS: dict[str, Any] = {
    **KEYS, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}
_NULLABLE = frozenset({"num_key_value_heads", "sliding_window"})


def _windows(values: Values, where: str) -> tuple[int, ...]:
    """Return the window of each layer; only layers from `max_window_layers` on have one."""
    first = values["max_window_layers"]
    if not 0 <= first <= LARGEST_LAYERS:
        raise ConfigError(f"{where}: max_window_layers", found=first,
                          expected="the index of the first layer with a window, or the number of layers")
    return read_windows(values, where, enabled=values["use_sliding_window"], slides=lambda index: index >= first)


def _read_qwen2(values: Values, where: str) -> dict[str, Any]:
    return read_llama_like(values, where, qkv_bias=True, windows=_windows(values, where))


def _read_qwen3(values: Values, where: str) -> dict[str, Any]:
    bias = values["attention_bias"]
    return read_llama_like(values, where, qkv_bias=bias, attention_out_bias=bias, qk_norm="head",
                           windows=_windows(values, where))


QWEN2 = Family(keys=_KEYS, nullable=_NULLABLE, fixed={"use_mrope": False}, key_names=KEY_NAMES, read=_read_qwen2,
               tensors=llama_like_tensors, embedding="model.embed_tokens.weight", prefix="model.")
QWEN3 = Family(keys={**_KEYS, "head_dim": 128, "attention_bias": False}, nullable=_NULLABLE, key_names=KEY_NAMES,
               read=_read_qwen3, tensors=llama_like_tensors, embedding="model.embed_tokens.weight", prefix="model.")
