"""Names of transformers' tensors: in a model's state_dict, in weights files, and without the family's prefix."""

import re
from collections.abc import Iterable

from pretrain.model.config import ModelConfig
from pretrain.model.families.table import FAMILIES

HEAD = "lm_head.weight"
# buffers that older versions of transformers saved with the weights
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
# a matrix of one expert in weights files
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")


def is_buffer(name: str) -> bool:
    """Return whether a tensor is a buffer of an older version of transformers, which is not a parameter."""
    return name.endswith(_BUFFERS)


def names_in_model(names: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """Map each name in weights files to the name in transformers' model with a head. Buffers are left out.

    If no name has the family's prefix, the files are those of the base model, which has no prefix.
    """
    family = FAMILIES[config.architecture]
    names = list(names)
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
    """Return the name that transformers gives a tensor of a model in weights files."""
    head = FAMILIES[config.architecture].head_in_files
    return f"{head}." + name.removeprefix("lm_head.") if head and name.startswith("lm_head.") else name


def name_in_module(name: str) -> str:
    """Return the parameter of transformers' model that a tensor of the weights files becomes, experts excepted.

    transformers 5 (conversion_mapping.py) renames Mixtral's routers when it loads and saves weights.
    """
    return name.replace(".block_sparse_moe.", ".mlp.")


def stacked_in_module(name: str) -> tuple[str, bool]:
    """Return the parameter of transformers' model that has a matrix of an expert, and whether it is the second half.

    In transformers 5, `experts.gate_up_proj` has the rows of all experts' gates, each followed by those of `up`, and
    `experts.down_proj` has the other matrices.
    """
    found = _EXPERT.fullmatch(name)
    assert found is not None, name
    layer, part = name_in_module(found[1]), found[2]
    if part in ("w2", "down_proj"):
        return f"{layer}.down_proj", False
    return f"{layer}.gate_up_proj", part in ("w3", "up_proj")
