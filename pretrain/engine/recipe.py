"""The training recipe beyond DeepSpeed's: clipping, terms of the loss, and the states that checkpoints keep."""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.callback import Callback
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.engine.attachments import attachments
from pretrain.engine.clipping import AdaptiveClipping, ValueClipping
from pretrain.engine.steps import data_parallel_size, tensor_parallel_size
from pretrain.engine.update_statistics import NoiseScale
from pretrain.errors import ConfigError
from pretrain.model.layers.moe import STATISTICS, RouterLosses, train_routers

_LARGEST = "expert_load_max"  # over the layers; of the other statistics of routers the mean
_OF_FLAGS = ("early_stopping", "adaptive_clipping", "noise_scale")  # states that runs without these flags drop


def add_recipe(engine: DeepSpeedEngine, args: RunArguments) -> None:
    """Add clipping and the gradient noise scale to the update of a newly built engine, as the flags ask for."""
    own = attachments(engine)
    own.keep_state["spikes"] = own.spikes
    if args.gradient_value_clipping:
        own.update.add(ValueClipping(engine, args.gradient_value_clipping))
    if args.adaptive_clipping:
        own.keep_state["adaptive_clipping"] = own.update.add(AdaptiveClipping(
            engine, percentile=args.adaptive_clipping, window=args.adaptive_clipping_window))
    if args.noise_scale_interval:
        own.keep_state["noise_scale"] = own.update.add(NoiseScale(engine, interval=args.noise_scale_interval))


def keep_states(engine: DeepSpeedEngine, callbacks: dict[str, Callback]) -> None:
    """Let checkpoints keep the states of callbacks. Raises ConfigError for a name that the core has."""
    own = attachments(engine)
    for name, callback in callbacks.items():
        if name in own.keep_state or (name in _OF_FLAGS and not type(callback).__module__.startswith("pretrain.")):
            raise ConfigError(f"callback {name}", problem="a part of every run keeps its state under this name",
                              remedy="give the class another `name`")
    own.keep_state |= callbacks


def recipe_states(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the states of all parts by name, for the manifest of a checkpoint. Synchronizes the device."""
    own = attachments(engine)
    states = {name: part.state() for name, part in own.keep_state.items()}
    return {**own.unclaimed_states, **{name: state for name, state in states.items() if state is not None}}


def set_recipe_states(engine: DeepSpeedEngine, states: dict[str, Any]) -> None:
    """Restore what `recipe_states` returned, in any layout. A part without a saved state starts without one.

    The state of a part that this run does not load is kept for the next checkpoint, unless a flag of this run decides
    whether the part exists.
    """
    own = attachments(engine)
    own.unclaimed_states = {name: state for name, state in states.items()
                            if name not in own.keep_state and name not in _OF_FLAGS}
    for name, part in own.keep_state.items():
        part.set_state(states.get(name))


def recipe_values(engine: DeepSpeedEngine) -> dict[str, float | None]:
    """Return the values of a row of metrics.jsonl that exist with some flags only. Collective; synchronizes."""
    noise_scale = attachments(engine).update.find(NoiseScale)
    return {**loss_term_values(engine), **({} if noise_scale is None else {"noise_scale": noise_scale.value()})}


def loss_term_values(engine: DeepSpeedEngine) -> dict[str, float]:
    """Return {"z_loss": coefficient * mean squared logsumexp of the training tokens since the last call}.

    Empty without --z_loss. Otherwise collective; synchronizes the device.
    """
    loss = engine.module.training_loss
    if not loss.terms.z_loss:
        return {}
    squares = loss.take_squares()  # None on all but the last pipeline stage
    total = torch.zeros((), device=engine.device) if squares is None else squares.float()
    dist.all_reduce(total)
    copies = data_parallel_size(engine) * tensor_parallel_size(engine)  # tensor-parallel ranks have equal values
    return {"z_loss": loss.terms.z_loss * float(total) / copies}


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
