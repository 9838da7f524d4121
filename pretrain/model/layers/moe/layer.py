"""MoE: a router and experts in place of a block's MLP.

Shapes: B batch, T positions, N = B T tokens, D hidden size, E experts.
"""

import torch
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups
from pretrain.model.config import ModelConfig
from pretrain.model.layers.linear import Linear
from pretrain.model.layers.moe.experts import Experts
from pretrain.model.layers.moe.router_losses import RouterLosses, add_router_losses
from pretrain.model.layers.moe.routing import combine, expert_capacity, plan_dispatch, route, send


class MoE(nn.Module):
    """The sum of the outputs of each token's experts, weighted by the router, and of a shared expert, if any.

    Attributes:
        losses: of the routers; None: none, and no statistics.
        capacity_factor: in training, an expert processes at most this factor times the mean number of tokens; 0: all.

    Args:
        index: of the block.
        shared_expert: an MLP that computes all tokens.
    """

    def __init__(self, config: ModelConfig, index: int, *, shared_expert: nn.Module | None = None,
                 plain_operators: bool = False, groups: ParallelGroups = NO_GROUPS) -> None:
        super().__init__()
        self.index, self.num_experts, self.experts_per_token = index, config.num_experts, config.experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        self.router = Linear(config.hidden_size, config.num_experts, bias=False, plain_operators=True)
        self.experts = Experts(config, group=groups.expert, plain_operators=plain_operators)
        self.shared_expert = shared_expert
        self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, plain_operators=True) \
            if shared_expert is not None and config.shared_expert_gate else None
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
            out_ND = out_ND + self._shared(x_ND)
        if self.losses is not None and out_ND.requires_grad:
            out_ND = add_router_losses(out_ND, routing, dispatch, self.losses, self.index)
        return out_ND.view_as(x_BTD)

    def _shared(self, x_ND: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None
        out_ND: torch.Tensor = self.shared_expert(x_ND)
        return out_ND if self.shared_expert_gate is None else torch.sigmoid(self.shared_expert_gate(x_ND)) * out_ND


def train_routers(module: nn.Module, config: ModelConfig, *, load_balancing: float, z_loss: float,
                  capacity_factor: float) -> RouterLosses | None:
    """Give the layers with experts their losses and their capacity. Return the losses; None without such layers."""
    if not config.num_experts:
        return None
    losses = RouterLosses(load_balancing, z_loss, config.num_moe_layers())
    for layer in module.modules():
        if isinstance(layer, MoE):
            layer.losses, layer.capacity_factor = losses, capacity_factor
    return losses
