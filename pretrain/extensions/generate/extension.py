"""Text from a run, a checkpoint or a transformers folder: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "generate", "Generates text from a checkpoint of any layout, or from a transformers model.",
    commands={"generate": Command("during and after a run", "generate text", ".main",
                                  other_words="chat sample complete inference infer")},
    advice={"trained": "ds-pretrain generate {run} --prompt TEXT"})
