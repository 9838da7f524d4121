"""A translation of the settings of GPT-NeoX, Megatron-LM, the Trainer or torchtitan: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "translate", "Writes the settings of a run from those of another training program.",
    commands={"translate": Command("run", "translate settings of GPT-NeoX, Megatron, Trainer or torchtitan", ".main")})
