"""Searches settings by many runs, with Optuna: the subcommand."""

from pretrain.extension import Command, Extension

EXTENSION = Extension(
    "sweep", "Searches settings by many runs, with Optuna.",
    commands={"sweep": Command("run", "search settings by many runs", ".main")})
