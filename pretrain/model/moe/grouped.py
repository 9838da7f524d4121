"""Products of rows with the matrices of their experts, as one operator for all experts.

Shapes: R rows in the order of their experts, E experts, I inputs, O outputs.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch.autograd.function import FunctionCtx, once_differentiable

# public from torch 2.10 on
_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNMENT = 16  # bytes; of each row (aten/src/ATen/native/GroupedMMUtils.h)


def can_group(x: torch.Tensor, weight_EOI: torch.Tensor) -> bool:
    """Return whether torch's grouped product computes these tensors: bf16, with aligned rows."""
    rows_are_aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight_EOI.shape[1:])
    return _grouped_mm is not None and x.dtype == weight_EOI.dtype == torch.bfloat16 and rows_are_aligned


def grouped_linear(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return [R, O]: each row times the transposed matrix of its expert, by torch's grouped product.

    Args:
        ends_E: int32, on the device: the row after the last one of each expert. The last end is R.
    """
    out: torch.Tensor = _GroupedLinear.apply(x_RI, weight_EOI, ends_E)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        assert _grouped_mm is not None
        ctx.save_for_backward(x_RI, weight_EOI, ends_E)
        out: torch.Tensor = _grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert _grouped_mm is not None
        x_RI, weight_EOI, ends_E = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_RO, needed = grads[0].contiguous(), ctx.needs_input_grad  # type: ignore[attr-defined]
        dx_RI = _grouped_mm(grad_RO, weight_EOI, offs=ends_E) if needed[0] else None
        dweight_EOI = _grouped_mm(grad_RO.t(), x_RI, offs=ends_E) if needed[1] else None
        return dx_RI, dweight_EOI, None


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
