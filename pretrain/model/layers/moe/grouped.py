"""Products of rows with the matrices of their experts, as one operator for all experts.

The rows are [R, I], in the order of their experts, with the end of each expert's rows: torch's grouped product. Or they
are [E, C, I], with equally many rows for each expert: torch's batched product.

Shapes: R rows, E experts, C rows of each expert, I inputs, O outputs.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.kernels.activation import activate, activate_backward

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
