"""Parameter groups of the optimizer: with and without weight decay, and with muP of two learning rates."""

from collections.abc import Iterable
from typing import Any

import torch

from pretrain.model.init_methods import is_embedding


def parameter_groups(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[dict[str, Any]]:
    """Return two groups: matrices with the optimizer's weight decay, and vectors (norms, biases) without.

    Args:
        parameters: pairs of name and parameter.
    """
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for _, parameter in parameters:
        (matrices if _dimensions(parameter) >= 2 else vectors).append(parameter)
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def mup_parameter_groups(parameters: Iterable[tuple[str, torch.nn.Parameter]], *, learning_rate: float,
                         multiplier: float) -> list[dict[str, Any]]:
    """Return three groups for muP: embeddings, vectors (without weight decay), and all other matrices.

    Embeddings and vectors have the base rate, other matrices the base rate divided by the multiplier (init_methods.py
    cites the paper). The rate that is logged is that of the first group. Pipeline stages without an embedding drop the
    first group; their first group then has the same rate.

    Args:
        parameters: pairs of name and parameter.
        learning_rate: base rate.
        multiplier: width of the model divided by that of the base model.
    """
    embeddings: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    matrices: list[torch.nn.Parameter] = []
    for name, parameter in parameters:
        if _dimensions(parameter) < 2:
            vectors.append(parameter)
        else:
            (embeddings if is_embedding(name) else matrices).append(parameter)
    return [{"params": embeddings, "lr": learning_rate}, {"params": vectors, "lr": learning_rate, "weight_decay": 0.0},
            {"params": matrices, "lr": learning_rate / multiplier}]


def _dimensions(parameter: torch.nn.Parameter) -> int:
    """Return the number of dimensions. Under `zero.Init` the shape is that of a partition; `ds_shape` is complete."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
