"""The orders of samples of Megatron-LM and GPT-NeoX: values of --sample_order."""

from pretrain.extension import Extension

EXTENSION = Extension(
    "megatron_order", "Reads samples in the order of Megatron-LM or GPT-NeoX, to continue their runs.",
    sample_orders={"megatron": "order:MegatronOrder", "neox": "order:NeoxOrder"})
