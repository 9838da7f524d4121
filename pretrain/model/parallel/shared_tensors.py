"""Collective operations with gradients, for tensors that the ranks of a group share.

Under tensor parallelism, the tensors between layers are shards of sequences: [B, T / size, D] on each rank, as in
Megatron-LM's sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2). A layer gathers the sequences
before a product with the columns of a matrix, and sums and scatters the product with the rows of the next one. The sum
over the ranks is computed in the dtype of the tensors.

With a group of one rank, each function returns its input. torch.compile traces other collective operations into a
graph (_functional_collectives).
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import _functional_collectives as collectives

from pretrain.distributed.parallel_groups import RankGroup
from pretrain.model.parameters import part_of

# torch 2.13 has renamed both, and warns about the names of earlier versions
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_traced_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or \
    collectives.all_gather_tensor_autograd
_traced_reduce_scatter: Any = getattr(collectives, "reduce_scatter_single_autograd", None) or \
    collectives.reduce_scatter_tensor_autograd
_Linear = Callable[[torch.Tensor], torch.Tensor]


class _WithAdjoint(torch.autograd.Function):
    """A linear function of a tensor. Its backward pass applies the adjoint function to the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, function: _Linear, adjoint: _Linear) -> torch.Tensor:
        ctx.adjoint = adjoint  # type: ignore[attr-defined]
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.adjoint(grads[0]), None, None


def with_adjoint(x: torch.Tensor, function: _Linear, adjoint: _Linear) -> torch.Tensor:
    """Return function(x), a linear function of x. Gradient: adjoint(gradient of the result)."""
    result: torch.Tensor = _WithAdjoint.apply(x, function, adjoint)
    return result


def gather(x: torch.Tensor, group: RankGroup, dim: int = 1) -> torch.Tensor:
    """Return the ranks' shards concatenated. Gradient: the sum over the ranks, of which each rank gets its shard."""
    if group.size == 1:
        return x
    if torch.compiler.is_compiling():
        traced: torch.Tensor = _traced_gather(x, dim, group.handle)
        return traced
    return with_adjoint(x, partial(_gathered, group=group, dim=dim), partial(_summed_shard, group=group, dim=dim))


def sum_and_scatter(x: torch.Tensor, group: RankGroup, dim: int = 1) -> torch.Tensor:
    """Return this rank's shard of the sum over the ranks. Gradient: the ranks' shards concatenated."""
    if group.size == 1:
        return x
    if torch.compiler.is_compiling():
        traced: torch.Tensor = _traced_reduce_scatter(x, "sum", dim, group.handle)
        return traced
    return with_adjoint(x, partial(_summed_shard, group=group, dim=dim), partial(_gathered, group=group, dim=dim))


@contextlib.contextmanager
def summed_gradients(module: nn.Module, group: RankGroup) -> Iterator[None]:
    """Let the module compute with parameters whose gradients are summed over the ranks, all by one collective.

    These are the parameters that every rank has completely, and uses on its shards alone. In this context, attributes
    of the instances hide them: views, all made by one function, whose backward function sums their gradients.
    """
    if group.size == 1 or not torch.is_grad_enabled():
        yield
        return
    owners = [(owner, name, parameter) for owner in module.modules() for name, parameter in owner._parameters.items()
              if parameter is not None and part_of(parameter) is None]
    views = _SummedGradients.apply(group, *(parameter for _, _, parameter in owners))
    for (owner, name, _), view in zip(owners, views, strict=True):
        owner.__dict__[name] = view
    try:
        yield
    finally:
        for owner, name, _ in owners:
            del owner.__dict__[name]


def own_shard(x: torch.Tensor, group: RankGroup, dim: int = 1) -> torch.Tensor:
    """Return this rank's shard of a tensor that all ranks have: a view. Its size must be divisible by the ranks."""
    if group.size == 1:
        return x
    size = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * size, size)


def sum_over_ranks(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum over the ranks. Gradient: the sum over the ranks, each of which uses the sum."""
    if group.size == 1:
        return x
    if torch.compiler.is_compiling():
        traced: torch.Tensor = _TracedSum.apply(x, group.handle)
        return traced
    return with_adjoint(x, partial(total, group=group), partial(total, group=group))


def begin_gather(x: torch.Tensor, group: RankGroup, dim: int = 1) -> Callable[[], torch.Tensor]:
    """Begin to gather the ranks' shards, without a gradient. The returned function waits, and returns the result."""
    shards, own = x.new_empty(group.size, *x.shape), x.contiguous()
    work = _all_gather(shards.view(-1), own.view(-1), group=group.handle, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return torch.cat(shards.unbind(0), dim) if x.shape[:dim].numel() > 1 else \
            shards.view(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1:])
    return wait


def begin_sum_and_scatter(x: torch.Tensor, group: RankGroup, dim: int = 1) -> Callable[[], torch.Tensor]:
    """Begin to sum over the ranks, without a gradient. The returned function waits, and returns this rank's shard."""
    shards = torch.stack(x.chunk(group.size, dim)) if x.shape[:dim].numel() > 1 else x.contiguous()
    own = x.new_empty(*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1:])
    work = _reduce_scatter(own.view(-1), shards.view(-1), group=group.handle, async_op=True)

    def wait() -> torch.Tensor:
        nonlocal shards
        work.wait()
        del shards  # it had to exist until here
        return own
    return wait


def _gathered(x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
    return begin_gather(x, group, dim)()


def _summed_shard(x: torch.Tensor, group: RankGroup, dim: int) -> torch.Tensor:
    return begin_sum_and_scatter(x, group, dim)()


def total(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum over the ranks, without a gradient."""
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group.handle)
    return summed


class _SummedGradients(torch.autograd.Function):
    """Views of tensors. Gradients: the sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=ctx.group.handle)
        sums = flat.split([grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(sums, grads, strict=True))


class _TracedSum(torch.autograd.Function):
    """Sums tensors, and their gradients, over the ranks, for torch.compile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: Any) -> torch.Tensor:
        ctx.handle = handle
        return collectives.all_reduce(x, "sum", handle)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return collectives.all_reduce(grads[0], "sum", ctx.handle), None
