"""MoE: a router and experts in place of a block's MLP; the choice of experts, and the losses of the routers.

Shapes: B batch, T positions, N = B T tokens, D hidden size, K experts per token, E experts, R rows (tokens sent to
experts, in the order of the experts), L layers of the model. An assignment is a pair of a token and one of its experts;
there are N K of them.

Under tensor parallelism, each rank routes its shard of the sequences: N are the tokens of the shard. The experts are
then divided over these ranks (expert parallelism), complete, and the shared expert's matrices as those of other layers.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.distributed.parallel_groups import ALONE, NO_GROUPS, ParallelGroups, RankGroup
from pretrain.model.description import ModelConfig, Parameters, inside
from pretrain.model.layers.experts import Experts
from pretrain.model.layers.linear import ShardLinear
from pretrain.model.parallel.shared_tensors import total

STATISTICS = ("load_balancing_loss", "router_z_loss", "expert_load_max", "dropped_tokens", "router_entropy")


@dataclass(frozen=True)
class Routing:
    """The experts of each token."""

    logits_NE: torch.Tensor
    probs_NE: torch.Tensor  # fp32
    experts_NK: torch.Tensor  # int64, the most probable expert first
    weights_NK: torch.Tensor  # factors of the experts' outputs


@dataclass(frozen=True)
class Dispatch:
    """Position of each assignment among the rows that the experts process: rows of expert 0 first.

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


@dataclass
class RouterLosses:
    """Coefficients of the routers' losses, and statistics of the training micro-batches, of all layers with experts.

    Each loss of the model is the mean over these layers, and over micro-batches and data-parallel ranks. They reach the
    gradients only: the training loss remains the cross-entropy. With shards of the sequences, a loss of a rank is such
    that the mean over the shards is the loss of the micro-batch.
    """

    load_balancing: float  # coefficient
    z_loss: float  # coefficient
    num_moe_layers: int  # of the complete model
    num_shards: int = 1  # of each sequence: tensor-parallel ranks
    # The loss scale divided by the number of micro-batches of a step on this rank. The engine multiplies the training
    # loss by it when it begins the backward pass, and cannot do so with losses inside the layers.
    scale: float = 1.0
    _sums: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> sum of the statistics over micro-batches
    _counts: dict[int, int] = field(default_factory=dict)

    def add(self, layer: int, statistics: torch.Tensor) -> None:
        """Add the statistics of a layer in one micro-batch, without waiting for the device."""
        known = self._sums.get(layer)
        self._sums[layer] = statistics if known is None else known + statistics
        self._counts[layer] = self._counts.get(layer, 0) + 1

    def take(self) -> dict[int, torch.Tensor]:
        """Return the mean statistics since the last call of each layer of this rank, in the order of STATISTICS."""
        means = {layer: total / self._counts[layer] for layer, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means


def load_balancing_loss(routing: Routing, assigned_E: torch.Tensor, num_shards: int = 1) -> torch.Tensor:
    """Return E * sum over the experts of (assignments / N) * (mean probability); K if the load is balanced.

    Args:
        assigned_E: assignments of each expert, in all shards of the sequences.
        num_shards: number of shards, of which `routing` is one.

    Switch Transformer (Fedus et al., arXiv 2101.03961), equation 4, for K experts per token as in transformers'
    load_balancing_loss_func, and for one layer. Dropped assignments count.
    """
    fraction_E = assigned_E / (num_shards * len(routing.probs_NE))
    return len(fraction_E) * torch.dot(fraction_E, routing.probs_NE.mean(0))


def router_z_loss(routing: Routing) -> torch.Tensor:
    """Return the mean squared logsumexp of the logits: ST-MoE (Zoph et al., arXiv 2202.08906), equation 5."""
    return routing.logits_NE.float().logsumexp(1).square().mean()


def add_router_losses(out: torch.Tensor, routing: Routing, dispatch: Dispatch, losses: RouterLosses,
                      layer: int, group: RankGroup = ALONE) -> torch.Tensor:
    """Return `out`. Its backward pass adds the gradients of the losses to the router's, and records the statistics.

    The statistics are recorded in the backward pass because a recomputed block runs its forward pass twice.

    Args:
        group: the ranks that have shards of the same sequences.
    """
    assigned_E = dispatch.assigned_E if group.size == 1 else total(dispatch.assigned_E, group)
    balance = load_balancing_loss(routing, assigned_E, group.size)
    with torch.set_grad_enabled(losses.z_loss > 0):
        z_loss = router_z_loss(routing)
    statistics = _statistics(balance, z_loss, routing, assigned_E, dispatch.kept_NK)
    same: torch.Tensor = _AddLosses.apply(out, balance, z_loss, statistics, losses, layer)
    return same


@torch.no_grad()
def _statistics(balance: torch.Tensor, z_loss: torch.Tensor, routing: Routing, assigned_E: torch.Tensor,
                kept_NK: torch.Tensor | None) -> torch.Tensor:
    load_E = assigned_E.float()
    dropped = torch.zeros_like(z_loss) if kept_NK is None else 1 - kept_NK.float().mean()
    entropy = torch.special.entr(routing.probs_NE).sum(1).mean()
    return torch.stack((balance, z_loss, load_E.max() / load_E.mean(), dropped, entropy))


class _AddLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, out: torch.Tensor, balance: torch.Tensor, z_loss: torch.Tensor,
                statistics: torch.Tensor, losses: RouterLosses, layer: int) -> torch.Tensor:
        ctx.statistics, ctx.losses, ctx.layer = statistics, losses, layer  # type: ignore[attr-defined]
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        losses: RouterLosses = ctx.losses  # type: ignore[attr-defined]
        losses.add(ctx.layer, ctx.statistics)  # type: ignore[attr-defined]
        needed = ctx.needs_input_grad  # type: ignore[attr-defined]
        scale = losses.scale / (losses.num_moe_layers * losses.num_shards)
        one = ctx.statistics.new_ones(())  # type: ignore[attr-defined]
        return (grads[0], one * (losses.load_balancing * scale) if needed[1] else None,
                one * (losses.z_loss * scale) if needed[2] else None, None, None, None)


class MoE(nn.Module):
    """The sum of the outputs of each token's experts, weighted by the router, and of a shared expert, if any.

    Attributes:
        losses: of the routers; None: none, and no statistics.
        capacity_factor: in training, an expert processes at most this factor times the mean number of tokens; 0: all.

    Args:
        parameters: the described parameters of router and experts.
        index: of the block.
        shared_expert: an MLP that computes all tokens.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, index: int = 0,
                 shared_expert: nn.Module | None = None, plain_operators: bool = False,
                 groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.index, self.num_experts, self.experts_per_token = index, config.num_experts, config.experts_per_token
        self.norm_topk_prob, self.group = config.norm_topk_prob, groups.tensor
        self.router = ShardLinear(inside(parameters, "router"), groups=groups)
        self.experts = Experts(config, inside(parameters, "experts"), groups=groups, plain_operators=plain_operators)
        self.shared_expert = shared_expert
        of_gate = inside(parameters, "shared_expert_gate")
        self.shared_expert_gate = ShardLinear(of_gate, groups=groups) if of_gate else None
        self.losses: RouterLosses | None = None
        self.capacity_factor = 0.0

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_ND = x_BTD.flatten(0, 1)
        routing = route(self.router(x_ND), self.experts_per_token, normalized=self.norm_topk_prob)
        factor = self.capacity_factor if self.training else 0.0
        dispatch = plan_dispatch(routing, capacity=expert_capacity(factor, len(x_ND), self.experts_per_token,
                                                                   self.num_experts))
        rows_RD = self.experts(send(x_ND, dispatch), dispatch.rows_E, dispatch.capacity)
        out_ND = combine(rows_RD, routing.weights_NK, dispatch)
        if self.shared_expert is not None:
            out_ND = out_ND + self._shared(x_BTD).flatten(0, 1)
        if self.losses is not None and out_ND.requires_grad:
            out_ND = add_router_losses(out_ND, routing, dispatch, self.losses, self.index, self.group)
        return out_ND.view_as(x_BTD)

    def _shared(self, x_BTD: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None
        out_BTD: torch.Tensor = self.shared_expert(x_BTD)
        return out_BTD if self.shared_expert_gate is None else torch.sigmoid(self.shared_expert_gate(x_BTD)) * out_BTD


def train_routers(module: nn.Module, config: ModelConfig, *, load_balancing: float, z_loss: float,
                  capacity_factor: float) -> RouterLosses | None:
    """Give the layers with experts their losses and their capacity. Return the losses; None without such layers."""
    if not config.num_experts:
        return None
    losses = RouterLosses(load_balancing, z_loss, config.num_moe_layers())
    for layer in module.modules():
        if isinstance(layer, MoE):
            layer.losses, layer.capacity_factor, losses.num_shards = losses, capacity_factor, layer.group.size
    return losses
