"""Names of transformers' tensors: for each parameter, in a model's state_dict, in weights files, without the prefix.

Imports no torch, so that the names and shapes in a weights file can be checked before torch is imported.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version

from packaging.version import Version

from pretrain.model.description import ModelConfig, Parameter
from pretrain.model.families import FAMILIES
from pretrain.model.families.family import Names

HEAD = "lm_head.weight"
# buffers that older versions of transformers saved with the weights
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
# a matrix of one expert in weights files
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class TensorRule:
    """One parameter of this project's model, and the tensors of transformers that hold the same numbers.

    To convert from transformers: concatenate the rows of `theirs`, transpose if `transposed`, then reorder the rows as
    `row_order` says. hf_weights.py does this in both directions.
    """

    ours: str  # as named by layer_specs.py
    shape: tuple[int, ...]  # of our parameter
    theirs: tuple[str, ...]
    their_rows: tuple[int, ...] = ()  # rows of each of `theirs`, if there is more than one
    transposed: bool = False  # theirs is [in, out]
    row_order: str = ""  # of families/family.py, Names.qkv_row_order

    @property
    def is_stacked(self) -> bool:
        """True if the parameter stacks the matrices of all experts. Each of them is one of `theirs`."""
        return len(self.shape) == 3 and bool(self.their_rows)  # parameters of wrapped layers can have 3 dimensions

    def their_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each tensor in `theirs`."""
        if self.transposed:
            return ((self.shape[1], self.shape[0]),)
        if self.is_stacked:
            return (self.shape[1:],) * self.shape[0]
        if len(self.theirs) == 1:
            return (self.shape,)
        return tuple((rows, *self.shape[1:]) for rows in self.their_rows)


def tensor_rules(config: ModelConfig) -> list[TensorRule]:
    """List the rules of all parameters, in the order of layer_specs.py, without a tied head."""
    return config.implementation.tensor_rules(config)


def name_in_module(name: str, config: ModelConfig) -> str:
    """Return the parameter of transformers' model that a tensor of a model becomes, experts excepted."""
    return config.implementation.name_in_module(config, name)


def family_rules(config: ModelConfig) -> list[TensorRule]:
    """List the rules of a model of families/."""
    names, rules = FAMILIES[config.architecture].names, []
    by_layer = {"embedding": names.embedding, "positions": names.positions, "EmbeddingNorm": names.embedding_norm,
                "FinalNorm": names.final_norm}
    for ours, parameter, layer, block in config.placed_parameters():
        if layer.kind == "block":
            rules.append(_block_rule(ours, parameter, names, f"{names.prefix}{names.blocks}.{block}"))
            continue
        module = by_layer.get(layer.kind) or by_layer.get(layer.class_name)
        theirs = f"{names.prefix}{module}" if module else "lm_head"
        rules.append(TensorRule(ours, parameter.shape, (f"{theirs}.{_kind(parameter)}",)))
    return rules


def _block_rule(ours: str, parameter: Parameter, names: Names, block: str) -> TensorRule:
    """Return the rule of a parameter of a block. `block`: their name of the block."""
    module, kind = parameter.name.removesuffix(".weight").removesuffix(".bias"), _kind(parameter)
    found = names.block[module]
    if parameter.is_expert:
        experts, rows, _ = parameter.shape
        theirs = tuple(f"{block}.{str(found).replace('*', str(expert))}.weight" for expert in range(experts))
        return TensorRule(ours, parameter.shape, theirs, their_rows=(rows,) * experts)
    theirs = tuple(f"{block}.{name}.{kind}" for name in ((found,) if isinstance(found, str) else found))
    return TensorRule(ours, parameter.shape, theirs, their_rows=parameter.segments if len(theirs) > 1 else (),
                      transposed=names.transposed and parameter.is_matrix,
                      row_order=names.qkv_row_order if module == "attention.qkv" else "")


def _kind(parameter: Parameter) -> str:
    return "bias" if parameter.name.endswith(".bias") else "weight"


def is_buffer(name: str) -> bool:
    """Return whether a tensor is a buffer of an older version of transformers, which is not a parameter."""
    return name.endswith(_BUFFERS)


def names_in_model(names: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """Map names in weights files of a family to those in transformers' model with a head. Buffers are left out.

    If no name has the family's prefix, the files are the base model's, which has no prefix.
    """
    names = list(names)
    family = FAMILIES[config.architecture].names
    prefixed = any(name.startswith(family.prefix) for name in names)
    result = {}
    for name in names:
        if is_buffer(name):
            continue
        if family.head_in_files and name.startswith(f"{family.head_in_files}."):
            result[name] = "lm_head." + name.removeprefix(f"{family.head_in_files}.")
        else:
            result[name] = name if prefixed or name.startswith("lm_head.") else family.prefix + name
    return result


def name_in_files(name: str, config: ModelConfig) -> str:
    """Return the name that transformers gives a tensor of a family's model in weights files."""
    head = FAMILIES[config.architecture].names.head_in_files
    return f"{head}." + name.removeprefix("lm_head.") if head and name.startswith("lm_head.") else name


def family_name_in_module(name: str, config: ModelConfig) -> str:
    """Return what `name_in_module` returns for a model of families/."""
    return _renamed_router(name_in_files(name, config) if _head_is_as_in_files() else name)


def _renamed_router(name: str) -> str:
    """transformers 5 (conversion_mapping.py) renames Mixtral's routers when it loads and saves weights."""
    return name.replace(".block_sparse_moe.", ".mlp.")


@functools.cache
def _head_is_as_in_files() -> bool:
    """Return whether the head of the installed transformers' GPT-NeoX is not yet called `lm_head` (before 5.14)."""
    return Version(version("transformers")) < Version("5.14")


def stacked_in_module(name: str) -> tuple[str, bool]:
    """Return the parameter of transformers' model that has a matrix of an expert, and whether it is the second half.

    In transformers 5, `experts.gate_up_proj` has the rows of all experts' gates, each followed by the rows of `up`, and
    `experts.down_proj` has the other matrices.
    """
    found = _EXPERT.fullmatch(name)
    assert found is not None, name
    layer, part = _renamed_router(found[1]), found[2]
    if part in ("w2", "down_proj"):
        return f"{layer}.down_proj", False
    return f"{layer}.gate_up_proj", part in ("w3", "up_proj")
