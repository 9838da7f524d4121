"""The losses of the routers in an engine: their scale in a step, and the values of a row of metrics.jsonl."""

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.config.validate import Plan
from pretrain.model.layers.moe import STATISTICS, RouterLosses, train_routers

_LARGEST = "expert_load_max"  # over the layers; of the other statistics the mean


def add_router_losses(module: torch.nn.Module, plan: Plan) -> None:
    """Give the layers with experts of a new module their losses and capacity, as flags and config.json say."""
    args, config = plan.args, plan.model
    coefficient = config.router_aux_loss if args.router_aux_loss is None else args.router_aux_loss
    module.router_losses = train_routers(  # type: ignore[assignment]
        module, config, load_balancing=coefficient, z_loss=args.router_z_loss,
        capacity_factor=args.expert_capacity_factor)


def router_values(engine: DeepSpeedEngine, num_layers: int) -> dict[str, float]:
    """Return the statistics of the routers, means over the training micro-batches since the last call and the ranks.

    Empty for a model without experts. Otherwise collective; synchronizes the device.
    """
    losses: RouterLosses | None = engine.module.router_losses
    if losses is None:
        return {}
    # rows of layers that other pipeline stages have, and of layers without experts, stay 0; the last column counts
    total = torch.zeros(num_layers, len(STATISTICS) + 1, device=engine.device)
    for layer, statistics in losses.take().items():
        total[layer, :-1], total[layer, -1] = statistics, 1
    dist.all_reduce(total)
    rows = total[total[:, -1] > 0].cpu()
    if not len(rows):
        return {}
    means = rows[:, :-1] / rows[:, -1:]
    return {name: float(column.max() if name == _LARGEST else column.mean())
            for name, column in zip(STATISTICS, means.unbind(1), strict=True)}
