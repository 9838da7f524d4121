"""Losses and statistics of the routers. They reach the gradients only: the training loss remains the cross-entropy.

Shapes: N tokens of a micro-batch, K experts per token, E experts, L layers of the model.
"""

from dataclasses import dataclass, field

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.layers.moe.routing import Dispatch, Routing

STATISTICS = ("load_balancing_loss", "router_z_loss", "expert_load_max", "dropped_tokens", "router_entropy")


@dataclass
class RouterLosses:
    """Coefficients of the losses, and the statistics of the training micro-batches, of all layers with experts.

    Each loss of the model is the mean over these layers, and over micro-batches and data-parallel ranks.
    """

    load_balancing: float  # coefficient
    z_loss: float  # coefficient
    num_moe_layers: int  # of the complete model
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


def load_balancing_loss(routing: Routing, dispatch: Dispatch) -> torch.Tensor:
    """Return E * sum over the experts of (assignments / N) * (mean probability); K if the load is balanced.

    Switch Transformer (Fedus et al., arXiv 2101.03961), equation 4, for K experts per token as in transformers'
    load_balancing_loss_func, and for one layer. Dropped assignments count.
    """
    fraction_E = dispatch.assigned_E / len(routing.probs_NE)
    return len(fraction_E) * torch.dot(fraction_E, routing.probs_NE.mean(0))


def router_z_loss(routing: Routing) -> torch.Tensor:
    """Return the mean squared logsumexp of the logits: ST-MoE (Zoph et al., arXiv 2202.08906), equation 5."""
    return routing.logits_NE.float().logsumexp(1).square().mean()


def add_router_losses(out: torch.Tensor, routing: Routing, dispatch: Dispatch, losses: RouterLosses,
                      layer: int) -> torch.Tensor:
    """Return `out`. Its backward pass adds the gradients of the losses to the router's, and records the statistics.

    The statistics are recorded in the backward pass because a recomputed block runs its forward pass twice.
    """
    balance = load_balancing_loss(routing, dispatch)
    with torch.set_grad_enabled(losses.z_loss > 0):
        z_loss = router_z_loss(routing)
    same: torch.Tensor = _AddLosses.apply(out, balance, z_loss, _statistics(balance, z_loss, routing, dispatch),
                                          losses, layer)
    return same


@torch.no_grad()
def _statistics(balance: torch.Tensor, z_loss: torch.Tensor, routing: Routing, dispatch: Dispatch) -> torch.Tensor:
    load_E = dispatch.assigned_E.float()
    kept_NK = dispatch.kept_NK
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
        scale = losses.scale / losses.num_moe_layers
        one = ctx.statistics.new_ones(())  # type: ignore[attr-defined]
        return (grads[0], one * (losses.load_balancing * scale) if needed[1] else None,
                one * (losses.z_loss * scale) if needed[2] else None, None, None, None)
