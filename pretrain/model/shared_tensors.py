"""Collective operations with gradients, for tensors that the ranks of a group share.

Under tensor parallelism, the tensors between layers are shards of sequences: [B, T / size, D] on each rank, as in
Megatron-LM's sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2). A layer gathers the sequences
before a product with the columns of a matrix, and sums and scatters the product with the rows of the next one. The sum
over the ranks is computed in the dtype of the tensors.

With a group of one rank, each function returns its input.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.distributed.parallel_groups import RankGroup

# torch 2.13 has renamed both, and warns about the names of earlier versions
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(x: torch.Tensor, group: RankGroup, dim: int = 1) -> torch.Tensor:
    """Return the ranks' shards concatenated. Gradient: the sum over the ranks, of which each rank gets its shard."""
    if group.size == 1:
        return x
    gathered: torch.Tensor = _Gather.apply(x, group, dim)
    return gathered


def sum_and_scatter(x: torch.Tensor, group: RankGroup, dim: int = 1) -> torch.Tensor:
    """Return this rank's shard of the sum over the ranks. Gradient: the ranks' shards concatenated."""
    if group.size == 1:
        return x
    scattered: torch.Tensor = _SumAndScatter.apply(x, group, dim)
    return scattered


def sum_gradient(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return x. Gradient: the sum over the ranks, for a parameter that each rank uses on its shards alone."""
    if group.size == 1:
        return x
    same: torch.Tensor = _SumGradient.apply(x, group)
    return same


def own_shard(x: torch.Tensor, group: RankGroup, dim: int = 1) -> torch.Tensor:
    """Return this rank's shard of a tensor that all ranks have: a view. Its size must be divisible by the ranks."""
    size = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * size, size)


def _gathered(x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
    shards = x.new_empty(group.size, *x.shape)
    _all_gather(shards.view(-1), x.contiguous().view(-1), group=group.handle)
    return torch.cat(shards.unbind(0), dim) if x.shape[:dim].numel() > 1 else \
        shards.view(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1:])


def _summed_shard(x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
    shards = torch.stack(x.chunk(group.size, dim)) if x.shape[:dim].numel() > 1 else x.contiguous()
    own = x.new_empty(*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1:])
    _reduce_scatter(own.view(-1), shards.view(-1), group=group.handle)
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim  # type: ignore[attr-defined]
        return _gathered(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _summed_shard(grads[0], ctx.group, ctx.dim), None, None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim  # type: ignore[attr-defined]
        return _summed_shard(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gathered(grads[0], ctx.group, ctx.dim), None, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total, None
