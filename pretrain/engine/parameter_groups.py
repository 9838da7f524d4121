"""Parameter groups of the optimizer."""

from collections.abc import Iterable
from typing import Any

import torch


def parameter_groups(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups: matrices, with the optimizer's own weight decay, and vectors (norms, biases), without any.

    Under `zero.Init` a parameter's own shape is that of its partition; `ds_shape` is the whole one's.
    """
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2 else vectors).append(parameter)
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
