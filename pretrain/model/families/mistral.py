"""Mistral: Llama with an attention window in all layers, or in none."""

from typing import Any

from pretrain.model.families.family import Family, Values
from pretrain.model.families.llama_like import KEY_NAMES, KEYS, llama_like_tensors, read_llama_like
from pretrain.model.families.windows import read_windows


def _read(values: Values, where: str) -> dict[str, Any]:
    return read_llama_like(values, where, windows=read_windows(values, where))


MISTRAL = Family(
    keys={**KEYS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
          "sliding_window": 4096},
    nullable=frozenset({"sliding_window"}), key_names=KEY_NAMES, read=_read,
    tensors=llama_like_tensors, embedding="model.embed_tokens.weight", prefix="model.")
