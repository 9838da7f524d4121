"""Llama 2 and 3."""

from typing import Any

from pretrain.model.families.family import Family, Values
from pretrain.model.families.llama_like import KEY_NAMES, KEYS, llama_like_tensors, read_llama_like


def _read(values: Values, where: str) -> dict[str, Any]:
    bias = values["attention_bias"]
    return read_llama_like(values, where, qkv_bias=bias, attention_out_bias=bias, mlp_bias=values["mlp_bias"])


LLAMA = Family(keys={**KEYS, "attention_bias": False, "mlp_bias": False}, nullable=frozenset({"attention_dropout"}),
               key_names=KEY_NAMES, read=_read,
               tensors=llama_like_tensors, embedding="model.embed_tokens.weight", prefix="model.")
