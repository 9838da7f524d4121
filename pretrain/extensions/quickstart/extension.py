"""A run of a few minutes on a fresh machine: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "quickstart", "Trains a small model on a fresh machine, from corpus to sample.",
    commands={"quickstart": Command("run", "train a small model on a fresh machine, from corpus to sample", ".main")},
    advice={"no run": "`ds-pretrain quickstart` trains a small model"})
