"""OLMo-2: norms of the outputs of attention and MLP instead of their inputs, and norms of queries and keys."""

from typing import Any

from pretrain.model.families.family import Family, Values
from pretrain.model.families.llama_like import KEY_NAMES, KEYS, llama_like_tensors, read_llama_like


def _read(values: Values, where: str) -> dict[str, Any]:
    bias = values["attention_bias"]
    return read_llama_like(values, where, qkv_bias=bias, attention_out_bias=bias, pre_norm=False, post_norm=True,
                           qk_norm="all")


OLMO2 = Family(keys={**KEYS, "vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}, key_names=KEY_NAMES,
               read=_read, tensors=llama_like_tensors, embedding="model.embed_tokens.weight", prefix="model.")
