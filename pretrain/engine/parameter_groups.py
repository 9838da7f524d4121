"""Parameter groups of the optimizer: with and without weight decay, and with muP of two learning rates."""

from collections.abc import Iterable, Set
from typing import Any

import torch

from pretrain.model.init_methods import is_embedding

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def parameter_groups(parameters: NamedParameters, undecayed: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """Return two groups: matrices with the optimizer's weight decay, and vectors (norms, biases) without.

    Args:
        parameters: pairs of name and parameter.
        undecayed: names of matrices that belong to the second group.
    """
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in parameters:
        (decayed if is_matrix(parameter) and name not in undecayed else others).append(parameter)
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def mup_parameter_groups(parameters: NamedParameters, *, learning_rate: float, multiplier: float,
                         undecayed: Set[str] = frozenset()) -> list[dict[str, Any]]:
    """Return the groups for muP: embeddings, vectors, all other matrices and, if there are any, undecayed ones of them.

    Embeddings and vectors have the base rate, other matrices the base rate divided by the multiplier (init_methods.py
    cites the paper). Undecayed embeddings are in the group of the vectors. The rate that is logged is that of the first
    group. Pipeline stages without an embedding drop the first group; their first group then has the same rate.

    Args:
        parameters: pairs of name and parameter.
        learning_rate: base rate.
        multiplier: width of the model divided by that of the base model.
        undecayed: names of matrices without weight decay.
    """
    embeddings: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in parameters:
        if not is_matrix(parameter) or (is_embedding(name) and name in undecayed):
            vectors.append(parameter)
        elif is_embedding(name):
            embeddings.append(parameter)
        else:
            (others if name in undecayed else decayed).append(parameter)
    groups = [{"params": embeddings, "lr": learning_rate},
              {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
              {"params": decayed, "lr": learning_rate / multiplier}]
    if others:
        groups.append({"params": others, "lr": learning_rate / multiplier, "weight_decay": 0.0})
    return groups


def is_matrix(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix. Under `zero.Init` its shape is a partition's; `ds_shape` is complete."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
