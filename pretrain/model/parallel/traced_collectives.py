"""The collective operations of shared_tensors.py in the form that torch.compile can trace into a graph."""

from typing import Any

import torch
from torch.distributed import _functional_collectives as collectives

from pretrain.distributed.parallel_groups import RankGroup

_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
_reduce_scatter: Any = getattr(collectives, "reduce_scatter_single_autograd", None) or \
    collectives.reduce_scatter_tensor_autograd


def gather(x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
    """Trace `shared_tensors.gather`."""
    gathered: torch.Tensor = _all_gather(x, dim, group.handle)
    return gathered


def sum_and_scatter(x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
    """Trace `shared_tensors.sum_and_scatter`."""
    scattered: torch.Tensor = _reduce_scatter(x, "sum", dim, group.handle)
    return scattered


def sum_gradient(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Trace `shared_tensors.sum_gradient`."""
    same: torch.Tensor = _SumGradient.apply(x, group.handle)
    return same


def sum_over_ranks(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Trace `shared_tensors.sum_over_ranks`."""
    total: torch.Tensor = _SumOverRanks.apply(x, group.handle)
    return total


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: Any) -> torch.Tensor:
        ctx.handle = handle
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return collectives.all_reduce(grads[0], "sum", ctx.handle), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: Any) -> torch.Tensor:
        ctx.handle = handle
        return collectives.all_reduce(x, "sum", handle)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return collectives.all_reduce(grads[0], "sum", ctx.handle), None
