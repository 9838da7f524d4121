"""The experts of a block: one parameter for each matrix stacks all experts', and one operator multiplies by it.

The rows are [R, I], in the order of their experts, with the end of each expert's rows: torch's grouped product. Or they
are [E, C, I], with equally many rows for each expert: torch's batched product.

Shapes: R rows in the order of their experts, E experts on this rank, C rows of each expert, D hidden size, F inner size
of an expert, I inputs and O outputs of a product.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.description import ModelConfig, Parameters
from pretrain.model.kernels.activation import activate, activate_backward, activated_linear, plain_activated_linear
from pretrain.model.kernels.linear import linear
from pretrain.model.parallel.token_exchange import (
    plan_equal_exchange,
    plan_exchange,
    return_from_experts,
    send_to_experts,
)
from pretrain.model.parameters import create_parameters


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
