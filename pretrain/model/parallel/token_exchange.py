"""Exchange of routed tokens between the ranks that share the experts: an all-to-all there, and one back.

Shapes: N rows of this rank (a token has one row for each expert that it was routed to), M received rows, E experts in
all, L experts on this rank, R ranks, D hidden size. Numbers of rows differ between ranks and steps: no row is dropped
or padded.

The ranks first exchange the numbers of rows. The host then waits for the device once for each layer, because an
all-to-all needs these numbers on the host. The backward pass exchanges the gradients with the same numbers. With a
capacity, all experts have equally many rows: the numbers are known, and the host does not wait.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pretrain.distributed.parallel_groups import RankGroup
from pretrain.model.parallel.shared_tensors import with_adjoint


@dataclass(frozen=True)
class Exchange:
    """Numbers of rows that the ranks send each other in one layer."""

    group: RankGroup
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    order: torch.Tensor  # [M] indexes of the received rows, by expert
    counts: torch.Tensor  # [L] received rows for each expert of this rank: int64, on the device


def plan_exchange(counts_E: torch.Tensor, group: RankGroup) -> Exchange:
    """Exchange the numbers of rows; collective. Synchronizes the device.

    Args:
        counts_E: this rank's rows for each expert: int64. The experts are divided evenly over the ranks, in order.
        group: the ranks that share the experts; at least 2.
    """
    counts_RL = counts_E.view(group.size, -1)
    received_RL = torch.empty_like(counts_RL)
    dist.all_to_all_single(received_RL.view(-1), counts_RL.contiguous().view(-1), group=group.handle)
    sent, received = torch.stack([counts_RL.sum(1), received_RL.sum(1)]).tolist()
    experts_L = torch.arange(counts_RL.shape[1], device=counts_E.device)
    expert_M = torch.repeat_interleave(experts_L.repeat(group.size), received_RL.view(-1), output_size=sum(received))
    return Exchange(group, sent, received, torch.argsort(expert_M, stable=True), received_RL.sum(0))


def plan_equal_exchange(num_experts: int, capacity: int, group: RankGroup, device: torch.device) -> Exchange:
    """Plan the exchange of rows of which each rank has `capacity` for each expert, without communication."""
    local = num_experts // group.size
    rows = [local * capacity] * group.size
    order = torch.arange(group.size * local * capacity, device=device).view(group.size, local, capacity)
    return Exchange(group, rows, rows, order.transpose(0, 1).flatten(),
                    torch.full((local,), group.size * capacity, device=device))


def send_to_experts(rows_ND: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Send rows that are sorted by expert. Returns the rows for this rank's experts, sorted by expert: [M, D]."""
    received = _all_to_all(rows_ND, exchange.group, exchange.sent, exchange.received)
    return received.index_select(0, exchange.order)


def return_from_experts(rows_MD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Send the experts' outputs back. Returns the outputs of this rank's rows, in the order in which they were sent."""
    by_rank = torch.empty_like(exchange.order).scatter_(
        0, exchange.order, torch.arange(len(exchange.order), device=rows_MD.device))
    return _all_to_all(rows_MD.index_select(0, by_rank), exchange.group, exchange.received, exchange.sent)


def _all_to_all(x: torch.Tensor, group: RankGroup, sent: list[int], received: list[int]) -> torch.Tensor:
    """Return the rows from each rank. Gradient: the rows go back."""
    def exchange(x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        output = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), received, sent, group=group.handle)
        return output

    return with_adjoint(x, partial(exchange, sent=sent, received=received),
                        partial(exchange, sent=received, received=sent))
