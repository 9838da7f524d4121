"""Averages of the weights of several checkpoints: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "average", "Averages the weights of several checkpoints of a run.",
    commands={"average": Command("weights and checkpoints", "average the weights of several checkpoints", ".main")})
