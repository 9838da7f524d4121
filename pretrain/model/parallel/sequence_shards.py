"""Sequence parallelism: each rank of a group holds a shard of the positions of every sequence.

All layers but attention compute each position by itself. Attention exchanges heads for positions: before it, each rank
sends to each other rank its positions of that rank's heads, so that every rank has all positions of some heads; after
it, the outputs go back (DeepSpeed Ulysses: Jacobs et al., arXiv 2309.14509, section 3.2).

DeepSpeed 0.19.8's DistributedAttention (sequence/layer.py) is not used: it exchanges queries, keys and values one after
the other, and it rejects models with fewer key/value heads than ranks. Here one exchange sends all of them.

Shapes: S ranks of the group, B batch, T positions, t = T / S positions of a rank, H query heads, K key/value heads,
G = H + 2 K, E elements per head.
"""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.distributed.parallel_groups import RankGroup
from pretrain.model.description import local_kv_heads
from pretrain.model.parallel.shared_tensors import total, with_adjoint


def sum_of_shards(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum over the ranks. Gradient: the sum's, unchanged, because every rank computes the same sum."""
    if group.size == 1:
        return x
    return with_adjoint(x, partial(total, group=group), lambda grad: grad)


def heads_for_positions(inputs: Sequence[torch.Tensor], num_heads: int, group: RankGroup) -> torch.Tensor:
    """Return [B, T, G', E]: this rank's heads of queries, keys and values at all positions.

    Args:
        inputs: (qkv [B, t, G, E],) or (q [B, t, H, E], k [B, t, K, E], v [B, t, K, E]). H must be divisible by S.
    """
    inputs = _repeated(inputs, num_heads, group.size)
    exchanged: torch.Tensor = _HeadsForPositions.apply(num_heads, group, *inputs)
    return exchanged


def positions_for_heads(x_BTHE: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return [B, t, H, E], all heads at this rank's positions, from [B, T, H / S, E]."""
    def exchange(x_BTHE: torch.Tensor) -> torch.Tensor:
        return _all_to_all(_by_rank(x_BTHE, 1, group.size).contiguous(), group).movedim(0, 2).flatten(2, 3)

    def exchange_back(grad_BtHE: torch.Tensor) -> torch.Tensor:
        return _all_to_all(_by_rank(grad_BtHE, 2, group.size).contiguous(), group).movedim(0, 1).flatten(1, 2)

    return with_adjoint(x_BTHE, exchange, exchange_back)


def _repeated(inputs: Sequence[torch.Tensor], num_heads: int, size: int) -> Sequence[torch.Tensor]:
    """Return the inputs with `local_kv_heads` * S key/value heads."""
    num_kv_heads = (inputs[0].shape[2] - num_heads) // 2 if len(inputs) == 1 else inputs[1].shape[2]
    if size * local_kv_heads(num_heads, num_kv_heads, size) == num_kv_heads:
        return inputs
    kv_index = _kv_index(num_heads, num_kv_heads, size, inputs[0].device)
    if len(inputs) == 3:
        return inputs[0], inputs[1].index_select(2, kv_index), inputs[2].index_select(2, kv_index)
    queries = torch.arange(num_heads, device=kv_index.device)
    keys = num_heads + kv_index
    return (inputs[0].index_select(2, torch.cat((queries, keys, keys + num_kv_heads))),)


@functools.cache
def _kv_index(num_heads: int, num_kv_heads: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the key/value heads of rank 0, then of rank 1, and so on."""
    of_rank, per_kv_head = local_kv_heads(num_heads, num_kv_heads, size), num_heads // num_kv_heads
    queries_per_kv = num_heads // size // of_rank
    return torch.tensor([number * queries_per_kv // per_kv_head for number in range(size * of_rank)], device=device)


def _pieces(tensors: Sequence[torch.Tensor], num_heads: int) -> list[torch.Tensor]:
    """Return queries, keys and values, as views of a single tensor if there is only one."""
    if len(tensors) == 3:
        return list(tensors)
    kv_heads = (tensors[0].shape[2] - num_heads) // 2
    return list(tensors[0].split((num_heads, kv_heads, kv_heads), dim=2))


def _by_rank(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return x with dimension `dim` divided among the ranks: [S, ...]."""
    return x.unflatten(dim, (size, -1)).movedim(dim, 0)


def _all_to_all(sent: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Send sent[r] to rank r, and return what each rank sent: [S, ...]."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.handle)
    return received


class _HeadsForPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, num_heads: int, group: RankGroup, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.num_heads, ctx.group = num_heads, group  # type: ignore[attr-defined]
        ctx.shapes = [x.shape for x in inputs]  # type: ignore[attr-defined]
        sent_SBtGE = torch.cat([_by_rank(x, 2, group.size) for x in _pieces(inputs, num_heads)], dim=3)
        return _all_to_all(sent_SBtGE, group).movedim(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        group = ctx.group
        received_SBtGE = _all_to_all(_by_rank(grads[0], 1, group.size).contiguous(), group)
        gradients = [grads[0].new_empty(shape) for shape in ctx.shapes]
        pieces = [_by_rank(x, 2, group.size) for x in _pieces(gradients, ctx.num_heads)]
        sizes = [piece.shape[3] for piece in pieces]
        for piece, received in zip(pieces, received_SBtGE.split(sizes, dim=3), strict=True):
            piece.copy_(received)
        return None, None, *gradients
