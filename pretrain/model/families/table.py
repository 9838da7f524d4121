"""All model families, by their `model_type` in a config.json."""

from pretrain.model.families.family import Family
from pretrain.model.families.gpt2 import GPT2
from pretrain.model.families.gpt_neox import GPT_NEOX
from pretrain.model.families.llama import LLAMA

FAMILIES: dict[str, Family] = {"gpt2": GPT2, "gpt_neox": GPT_NEOX, "llama": LLAMA}
