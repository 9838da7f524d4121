"""The experts of a block: one parameter for each matrix stacks all experts', and one operator multiplies by it.

The rows are [R, I], in the order of their experts, with the end of each expert's rows: torch's grouped product. Or they
are [E, C, I], with equally many rows for each expert: torch's batched product.

The ranks that share the experts exchange routed tokens by an all-to-all there, and one back. They first exchange the
numbers of rows, which differ between ranks and steps: no row is dropped or padded. The host then waits for the device
once for each layer, because an all-to-all needs these numbers on the host. The backward pass exchanges the gradients
with the same numbers. With a capacity, all experts have equally many rows: the numbers are known, and the host does not
wait.

Shapes of the exchange: N rows of this rank (a token has one row for each expert that it was routed to), M received
rows, E experts in all, L experts on this rank, R ranks.

Shapes: R rows in the order of their experts, E experts on this rank, C rows of each expert, D hidden size, F inner size
of an expert, I inputs and O outputs of a product.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankGroup
from pretrain.model.description import ModelConfig, Parameters
from pretrain.model.kernels.activation import activate, activate_backward, activated_linear, plain_activated_linear
from pretrain.model.kernels.linear import linear
from pretrain.model.parallel.shared_tensors import with_adjoint
from pretrain.model.parameters import create_parameters


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


class Experts(nn.Module):
    """down(activation(gate(x)) * up(x)) with other matrices for each expert.

    Args:
        parameters: the described `gate`, `up` and `down`.
        groups: the ranks that share the experts; each has the complete matrices of some of them.
        plain_operators: use torch's operators instead of the custom kernels.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def __init__(self, config: ModelConfig, parameters: Parameters, *, groups: ParallelGroups = NO_GROUPS,
                 plain_operators: bool = False) -> None:
        super().__init__()
        assert config.gated_mlp, "experts without a gate"
        assert not config.mlp_bias, "experts with biases"
        self.activation, self.plain_operators, self.group = config.activation, plain_operators, groups.expert
        create_parameters(self, parameters, groups)

    def forward(self, x_RD: torch.Tensor, rows_E: torch.Tensor, capacity: int = 0) -> torch.Tensor:
        """Return the outputs [R, D].

        Args:
            x_RD: this rank's rows for all experts, also for experts of other ranks.
            rows_E: int64, on the device of x: rows of each expert.
            capacity: the number of rows of each expert if all have equally many; otherwise 0.
        """
        if self.group.size == 1:
            return self._compute(x_RD, rows_E, capacity)
        exchange = plan_equal_exchange(len(rows_E), capacity, self.group, x_RD.device) if capacity else \
            plan_exchange(rows_E, self.group)
        out_RD = self._compute(send_to_experts(x_RD, exchange), exchange.counts, capacity * self.group.size)
        return return_from_experts(out_RD, exchange)

    def _compute(self, x_RD: torch.Tensor, rows_E: torch.Tensor, capacity: int) -> torch.Tensor:
        """Return the outputs of this rank's experts."""
        if len(x_RD) == 0:  # not the input itself: the matrices need gradients on each rank that holds them
            return self._products(x_RD.view(len(rows_E), 0, x_RD.shape[1]), None).flatten(0, 1)
        if capacity:
            return self._products(x_RD.view(-1, capacity, x_RD.shape[1]), None).flatten(0, 1)
        if x_RD.device.type == "cpu":
            return self._one_by_one(x_RD, rows_E)
        if can_group(x_RD, self.up) and can_group(x_RD, self.down):
            return self._products(x_RD, rows_E.cumsum(0).to(torch.int32))
        x_ECD, slot_R = to_slots(x_RD, rows_E, int(rows_E.max()))  # waits for the device
        return self._products(x_ECD, None).flatten(0, 1).index_select(0, slot_R)

    def _products(self, x: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs for the rows [R, D] with their ends, or for [E, C, D], by one operator for all experts."""
        gate, up = expert_linear(x, self.gate, ends_E), expert_linear(x, self.up, ends_E)
        return activated_expert_linear(self.activation, up, gate, self.down, ends_E)

    def _one_by_one(self, x_RD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
        """Compute each expert with the kernels of the MLP. Only on CPUs, where a loop costs little."""
        down = plain_activated_linear if self.plain_operators else activated_linear
        widen = nn.functional.linear if self.plain_operators else linear
        # unbind, because the gradients of indexed matrices would each have the size of the complete parameter
        experts = zip(x_RD.split(rows_E.tolist()), self.gate.unbind(0), self.up.unbind(0), self.down.unbind(0),
                      strict=True)
        return torch.cat([down(self.activation, widen(x_D, up, None), widen(x_D, gate, None), weight, None)
                          for x_D, gate, up, weight in experts if len(x_D)])


# public from torch 2.10 on
_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNMENT = 16  # bytes; of each row (aten/src/ATen/native/GroupedMMUtils.h)


def can_group(x: torch.Tensor, weight_EOI: torch.Tensor) -> bool:
    """Return whether torch's grouped product computes these tensors: bf16, with aligned rows."""
    rows_are_aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight_EOI.shape[1:])
    return _grouped_mm is not None and x.dtype == weight_EOI.dtype == torch.bfloat16 and rows_are_aligned


def expert_linear(x: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor:
    """Return each row times the transposed matrix of its expert: [R, O] or [E, C, O].

    Args:
        ends_E: int32, on the device: the row after the last one of each expert. The last end is R. None: x is
            [E, C, I].
    """
    out: torch.Tensor = _Linear.apply(x, weight_EOI, ends_E)
    return out


def activated_expert_linear(activation: str, up: torch.Tensor, gate: torch.Tensor, weight_EOI: torch.Tensor,
                            ends_E: torch.Tensor | None) -> torch.Tensor:
    """Return `expert_linear` of activation(gate) * up. Saves up, gate and weight for the backward pass."""
    out: torch.Tensor = _ActivatedLinear.apply(activation, up, gate, weight_EOI, ends_E)
    return out


def _product(x: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor:
    if ends_E is None:
        return torch.bmm(x, weight_EIO)
    assert _grouped_mm is not None
    out: torch.Tensor = _grouped_mm(x, weight_EIO, offs=ends_E)
    return out


def _weight_gradient(x: torch.Tensor, grad: torch.Tensor, ends_E: torch.Tensor | None) -> torch.Tensor:
    """Return grad^T @ x for each expert, [E, O, I]. Without rows, it is 0."""
    if ends_E is None:
        return torch.bmm(grad.transpose(1, 2), x)
    if not len(x):
        return x.new_zeros(len(ends_E), grad.shape[1], x.shape[1])
    assert _grouped_mm is not None
    out: torch.Tensor = _grouped_mm(grad.t(), x, offs=ends_E)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight_EOI: torch.Tensor,
                ends_E: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight_EOI, ends_E)  # type: ignore[arg-type]  # it accepts None
        return _product(x, weight_EOI.transpose(1, 2), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_EOI, ends_E = ctx.saved_tensors  # type: ignore[attr-defined]
        grad, needed = grads[0].contiguous(), ctx.needs_input_grad  # type: ignore[attr-defined]
        return (_product(grad, weight_EOI, ends_E) if needed[0] else None,
                _weight_gradient(x, grad, ends_E) if needed[1] else None, None)


class _ActivatedLinear(torch.autograd.Function):
    """Second half of the experts: as in model/kernels/activation.py, the backward pass recomputes what is cheap."""

    @staticmethod
    def forward(ctx: FunctionCtx, activation: str, up: torch.Tensor, gate: torch.Tensor, weight_EOI: torch.Tensor,
                ends_E: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(up, gate, weight_EOI, ends_E)  # type: ignore[arg-type]
        ctx.activation = activation  # type: ignore[attr-defined]
        return _product(activate(activation, gate, up), weight_EOI.transpose(1, 2), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        up, gate, weight_EOI, ends_E = ctx.saved_tensors  # type: ignore[attr-defined]
        activation, grad = ctx.activation, grads[0].contiguous()  # type: ignore[attr-defined]
        activated = activate(activation, gate)
        dweight_EOI = _weight_gradient(activated * up, grad, ends_E)
        dinner = _product(grad, weight_EOI, ends_E)
        dup = activated.mul_(dinner)
        return None, dup, activate_backward(activation, dinner.mul_(up), gate), dweight_EOI, None


def to_slots(x_RI: torch.Tensor, rows_E: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows as [E, size, I], padded with zeros, and the slot in E * size of each row.

    Args:
        rows_E: rows of each expert, at most `size`.
    """
    num_experts, device = len(rows_E), x_RI.device
    starts_E = rows_E.cumsum(0) - rows_E
    expert_R = torch.repeat_interleave(torch.arange(num_experts, device=device), rows_E, output_size=len(x_RI))
    slot_R = torch.arange(len(x_RI), device=device) - starts_E[expert_R] + expert_R * size
    slots = x_RI.new_zeros(num_experts * size, x_RI.shape[1]).index_copy(0, slot_R, x_RI)
    return slots.view(num_experts, size, -1), slot_R
