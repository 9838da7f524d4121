"""Decoders of transformers that have no family: they train with transformers' own modules."""

from pretrain.extension import Command, Extension, Models

EXTENSION = Extension(
    "wrapped", "Trains decoders of transformers that have no family, with transformers' own modules.",
    models=Models("another causal language model of transformers", "model_types:model_types", "read:wrapped_config"),
    commands={"models": Command("before a run", "list families and presets; prove which decoders train", ".main")})
