"""Compare tensors, and record what autograd saves."""

from collections.abc import Callable
from typing import Any

import torch


def relative_error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    """Return |mine - exact| / |exact|, with the Frobenius norm."""
    return ((mine.double() - exact.double()).norm() / exact.double().norm()).item()


def saved_by(compute: Callable[..., torch.Tensor], *arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the result of `compute`, and the tensors that autograd saves for its backward pass."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return compute(*arguments), saved
