"""All model families, by their `model_type` in a config.json."""

from pretrain.model.families.experts import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from pretrain.model.families.family import Family
from pretrain.model.families.gemma import GEMMA, GEMMA2, GEMMA3
from pretrain.model.families.gpt_like import BLOOM, GPT2, GPT_NEOX, GPTJ, MPT, PHI
from pretrain.model.families.llama_like import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3, STABLELM, STARCODER2

FAMILIES: dict[str, Family] = {
    "bloom": BLOOM,
    "gemma": GEMMA, "gemma2": GEMMA2, "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "mpt": MPT,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "phi": PHI,
    "qwen2": QWEN2, "qwen3": QWEN3,
    "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}
