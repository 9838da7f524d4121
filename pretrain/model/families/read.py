"""Helpers that several families need to read a config.json."""

from collections.abc import Iterable

from pretrain.errors import ConfigError

# name in transformers (activations.py) -> our name; the formulas of gelu_new, gelu_fast and the like are equal
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2",
}


def activation(name: str, where: str) -> str:
    """Return our name of an activation function. Raises ConfigError, which names the key `where`."""
    if name not in _ACTIVATIONS:
        raise ConfigError(where, found=repr(name), expected=f"one of {listing(_ACTIVATIONS)}",
                          word=name, known=_ACTIVATIONS)
    return _ACTIVATIONS[name]


def ratio(total: int, parts: int) -> int:
    """Return total / parts, rounded down; 0 for 0 parts or fewer, which config.py rejects later."""
    return total // parts if parts > 0 else 0


def listing(names: Iterable[str]) -> str:
    """Join names for an error message."""
    return ", ".join(sorted(names))
