"""Decoders of transformers that have no family: they train with transformers' own modules."""

import ast
import functools
import importlib.util
from pathlib import Path

from pretrain.extension import Command, Extension, Models

_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def model_types() -> frozenset[str]:
    """Return those of the installed transformers, and of the user's code that was imported."""
    from pretrain.model.own_models import own_model_types

    return their_model_types() | own_model_types()


@functools.cache
def their_model_types() -> frozenset[str]:
    """Return the model types for which the installed transformers has a causal language model.

    They are read from its source: importing that module would import torch, which takes seconds.
    """
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent / "models" / "auto" / "modeling_auto.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and \
                [target.id for target in node.targets if isinstance(target, ast.Name)] == [_MAPPING]:
            return frozenset(dict(ast.literal_eval(node.value.args[0])))
    raise AssertionError(f"{source} has no {_MAPPING}")


EXTENSION = Extension(
    "wrapped", "Trains decoders of transformers that have no family, with transformers' own modules.",
    models=Models("another causal language model of transformers", "extension:model_types", "read:wrapped_config"),
    commands={"models": Command("before a run", "list families and presets; prove which decoders train", ".main")})
