"""Parameter groups of the optimizer: with and without weight decay."""

from collections.abc import Iterable
from typing import Any

import torch


def parameter_groups(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups: matrices with the optimizer's weight decay, and vectors (norms, biases) without.

    Under `zero.Init` the shape of a parameter is that of its partition; `ds_shape` is the complete shape.
    """
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 else vectors).append(parameter)
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
