"""A look at the documents of token files, and at the tensors that entered the model at a step: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "inspect", "Finds damaged, duplicate and degenerate documents, and shows the tensors of a step.",
    commands={"inspect": Command("data", "look at documents, and at the tensors of a step", ".main")})
