"""Which experts process a token: router, and the exchange between the order of tokens and the order of experts.

Shapes: N tokens, K experts per token, E experts, R rows (tokens sent to experts, in the order of the experts), D hidden
size. An assignment is a pair of a token and one of its experts; there are N K of them.
"""

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclass(frozen=True)
class Routing:
    """The experts of each token."""

    logits_NE: torch.Tensor
    probs_NE: torch.Tensor  # fp32
    experts_NK: torch.Tensor  # int64, the most probable expert first
    weights_NK: torch.Tensor  # factors of the experts' outputs


@dataclass(frozen=True)
class Dispatch:
    """Position of each assignment among the rows that the experts process: those of expert 0 first.

    Without a capacity, there is one row for each assignment. With a capacity C, each expert has C rows; rows without an
    assignment hold any token and have the factor 0.
    """

    row_NK: torch.Tensor  # int64; 0 for a dropped assignment
    assignment_R: torch.Tensor  # int64, index in N K
    rows_E: torch.Tensor  # int64, rows of each expert
    assigned_E: torch.Tensor  # int64, assignments of each expert, with dropped ones
    capacity: int = 0  # rows of each expert; 0: any number
    kept_NK: torch.Tensor | None = None  # bool; None: no assignment is dropped
    used_R: torch.Tensor | None = None  # bool, whether a row has an assignment; None: all have


def route(logits_NE: torch.Tensor, experts_per_token: int, *, normalized: bool) -> Routing:
    """Choose the most probable experts of each token, as transformers does.

    Args:
        normalized: divide the probabilities of a token's experts by their sum.
    """
    probs_NE = logits_NE.softmax(1, dtype=torch.float32)
    weights_NK, experts_NK = probs_NE.topk(experts_per_token, 1)
    if normalized:
        weights_NK = weights_NK / weights_NK.sum(1, keepdim=True)
    return Routing(logits_NE, probs_NE, experts_NK, weights_NK.to(logits_NE.dtype))


def expert_capacity(factor: float, num_tokens: int, experts_per_token: int, num_experts: int) -> int:
    """Return the largest number of tokens of an expert: `factor` times the mean, rounded up; 0 without a limit."""
    if not factor:
        return 0
    return min(num_tokens, math.ceil(factor * num_tokens * experts_per_token / num_experts))


@torch.no_grad()
def plan_dispatch(routing: Routing, *, capacity: int = 0) -> Dispatch:
    """Sort the assignments by expert. With a capacity, each expert keeps its most probable tokens, the earlier of two.

    Megatron-LM and DeepSpeed call this order of dropping "probs".
    """
    num_experts, (num_tokens, per_token) = routing.probs_NE.shape[1], routing.experts_NK.shape
    flat = routing.experts_NK.flatten()
    order = torch.arange(len(flat), device=flat.device)
    if capacity:
        chosen = routing.probs_NE.gather(1, routing.experts_NK)
        order = chosen.flatten().sort(descending=True, stable=True).indices
    order = order[flat[order].sort(stable=True).indices]
    sorted_experts = flat[order]
    # a search does not wait for the device, unlike bincount
    bounds = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=flat.device))
    assigned_E = bounds.diff()
    if not capacity:
        row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return Dispatch(row.view(num_tokens, per_token), order, assigned_E, assigned_E)
    place = torch.arange(len(order), device=order.device) - bounds[sorted_experts]
    kept = place < capacity
    row = torch.where(kept, sorted_experts * capacity + place, num_experts * capacity)
    assignment = order.new_zeros(num_experts * capacity + 1).scatter_(0, row, order)
    used = torch.zeros_like(assignment, dtype=torch.bool).scatter_(0, row, True)
    row_NK = torch.empty_like(order).scatter_(0, order, torch.where(kept, row, 0)).view(num_tokens, per_token)
    kept_NK = torch.empty_like(kept).scatter_(0, order, kept).view(num_tokens, per_token)
    return Dispatch(row_NK, assignment[:-1], torch.full_like(assigned_E, capacity), assigned_E, capacity, kept_NK,
                    used[:-1])


def send(x_ND: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Return the rows [R, D] that the experts process."""
    rows: torch.Tensor = _Send.apply(x_ND, dispatch.row_NK, dispatch.assignment_R, dispatch.kept_NK)
    return rows


def combine(rows_RD: torch.Tensor, weights_NK: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Return the weighted sum over the experts of each token, [N, D]. A dropped assignment adds nothing."""
    out: torch.Tensor = _Combine.apply(rows_RD, weights_NK, dispatch.row_NK, dispatch.assignment_R, dispatch.kept_NK,
                                       dispatch.used_R)
    return out


class _Send(torch.autograd.Function):
    """Gather rows. Unlike index_select's, the gradient is a sum in a fixed order, on GPUs too."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_ND: torch.Tensor, row_NK: torch.Tensor, assignment_R: torch.Tensor,
                kept_NK: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(row_NK, kept_NK)  # type: ignore[arg-type]  # it accepts None
        return x_ND.index_select(0, _tokens_of(assignment_R, row_NK))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row_NK, kept_NK = ctx.saved_tensors  # type: ignore[attr-defined]
        factors_NK = _kept(grads[0].new_ones(row_NK.shape), kept_NK)
        return _weighted_sum(grads[0], factors_NK, row_NK), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: torch.Tensor, weights_NK: torch.Tensor, row_NK: torch.Tensor,
                assignment_R: torch.Tensor, kept_NK: torch.Tensor | None,
                used_R: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows_RD, weights_NK, row_NK, assignment_R, kept_NK, used_R)  # type: ignore[arg-type]
        return _weighted_sum(rows_RD, _kept(weights_NK, kept_NK), row_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RD, weights_NK, row_NK, assignment_R, kept_NK, used_R = ctx.saved_tensors  # type: ignore[attr-defined]
        sent_RD = grads[0].index_select(0, _tokens_of(assignment_R, row_NK))
        products_R = (sent_RD * rows_RD).sum(1, dtype=torch.float32)
        factors_R = weights_NK.flatten()[assignment_R].to(rows_RD.dtype)
        if used_R is not None:
            factors_R = factors_R.masked_fill(~used_R, 0)
        grad_NK = _kept(products_R[row_NK], kept_NK).to(weights_NK.dtype)
        return sent_RD.mul_(factors_R.unsqueeze(1)), grad_NK, None, None, None, None


def _kept(x_NK: torch.Tensor, kept_NK: torch.Tensor | None) -> torch.Tensor:
    """Return x with 0 for dropped assignments."""
    return x_NK if kept_NK is None else x_NK.masked_fill(~kept_NK, 0)


def _tokens_of(assignment_R: torch.Tensor, row_NK: torch.Tensor) -> torch.Tensor:
    return assignment_R.div(row_NK.shape[1], rounding_mode="floor")


def _weighted_sum(rows_RD: torch.Tensor, weights_NK: torch.Tensor, row_NK: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of its rows times their factors."""
    rows_NKD = rows_RD.index_select(0, row_NK.flatten()).view(*row_NK.shape, -1)
    return torch.bmm(weights_NK.to(rows_RD.dtype).unsqueeze(1), rows_NKD).squeeze(1)
