"""The model types that can be wrapped. Imports no torch."""

import ast
import functools
import importlib.util
from pathlib import Path

from pretrain.model.own_models import own_model_types

_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def model_types() -> frozenset[str]:
    """Return those of the installed transformers, and of the user's code that was imported."""
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
