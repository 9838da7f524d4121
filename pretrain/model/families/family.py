"""The description of a family, and helpers that several families need to read a config.json.

A family is one value of `model_type` in a transformers config.json. Imports no torch: runs are validated before torch
is imported.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrain.errors import ConfigError
from pretrain.model.description import ModelConfig

Values = Mapping[str, Any]  # content of a config.json, with the family's defaults filled in
Fields = dict[str, Any]  # of ModelConfig
Read = Callable[[Values, Fields, str], Fields]

# name in transformers (activations.py) -> our name; the formulas of gelu_new, gelu_fast and the like are equal
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2",
}


@dataclass(frozen=True)
class Names:
    """Names of a family's modules in transformers. hf_names.py makes a rule for each parameter of them."""

    prefix: str  # of all their names except the head's; the base model alone is saved without it
    embedding: str
    blocks: str  # the list of blocks, such as "layers"
    final_norm: str
    # Our module in a block -> theirs. Several of theirs: we have their rows in one matrix. "*": number of an expert.
    block: Mapping[str, str | tuple[str, ...]]
    positions: str = ""  # learned positions
    embedding_norm: str = ""
    head_in_files: str = ""  # name of the head in weights files, if it is not "lm_head"
    transposed: bool = False  # their matrices in blocks are [inputs, outputs]
    # Order of the rows of queries, keys and values. "": the same; "head_major": theirs is head, then q, k, v; ours is
    # q, k, v, then head; "rotary_neighbours": theirs rotates the elements 2 i and 2 i + 1 of a query or key head, ours
    # i and i + rotary_size / 2
    qkv_row_order: str = ""


@dataclass(frozen=True)
class Family:
    """A value of `model_type`, and how its config.json becomes a ModelConfig.

    A field of ModelConfig has the value of the key with its name in `key_names`, or of the same name. If this is null,
    or no key, it has the value in `fields`, or ModelConfig's default. `read` computes the other fields.
    """

    keys: dict[str, Any]  # keys of the config.json that change the model, with transformers' defaults
    names: Names
    fields: Fields  # the same for all models of the family, except where a key replaces them
    key_names: dict[str, str] = field(default_factory=dict)  # field of ModelConfig -> key, where the two differ
    # (values, fields that are known already, name of the file for errors) -> other fields. Raises ConfigError.
    read: Read = lambda values, fields, where: {}
    older_keys: dict[str, str] = field(default_factory=dict)  # older name of a key -> its name; a file may have both
    nullable: frozenset[str] = frozenset()  # keys that may be null although their default is not null
    fixed: dict[str, Any] = field(default_factory=dict)  # keys for which only this value, or null, is implemented
    ignored: frozenset[str] = frozenset()  # keys that do not change the model

    def read_fields(self, given: Values, where: str) -> Fields:
        """Return the fields of ModelConfig for the content of a config.json. Raises ConfigError."""
        values = {**self.keys, **given}
        for older, name in self.older_keys.items():
            if None not in (values[older], values[name]) and values[older] != values[name]:
                raise ConfigError(f"{where}: {older}", found=values[older], expected=f"{values[name]}, as {name}",
                                  remedy="They are two names of one value")
            values[name] = values[older] if values[name] is None else values[name]
        fields = dict(self.fields)
        for name in (each.name for each in dataclasses.fields(ModelConfig)):
            key = self.key_names.get(name, name)
            if key in self.keys and values[key] is not None:
                fields[name] = activation(values[key], f"{where}: {key}") if name == "activation" else values[key]
        fields.setdefault("num_kv_heads", fields["num_heads"])
        fields.setdefault("head_size", ratio(fields["hidden_size"], fields["num_heads"]))
        fields.setdefault("intermediate_size", 4 * fields["hidden_size"])
        return {**fields, **self.read(values, fields, where)}


def separate_qkv(attention: str) -> tuple[str, ...]:
    """Return their names of three matrices for queries, keys and values."""
    return tuple(f"{attention}.{part}_proj" for part in "qkv")


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
