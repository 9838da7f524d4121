"""The training recipe beyond DeepSpeed's: early stopping, terms of the loss, and the states of a recipe's parts."""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.engine.attachments import attachments
from pretrain.engine.clipping import AdaptiveClipping, ValueClipping
from pretrain.engine.steps import data_parallel_size, tensor_parallel_size
from pretrain.engine.update_statistics import NoiseScale
from pretrain.model.layers.moe import STATISTICS, RouterLosses, train_routers

_LARGEST = "expert_load_max"  # over the layers; of the other statistics of routers the mean


class EarlyStopping:
    """Ends a run whose validation loss no longer decreases: it counts the evaluations in a row without a lower loss.

    All ranks must pass the same losses.

    Args:
        patience: number of such evaluations after which the run is over; 0: it never is.
        min_delta: smallest decrease that counts.
    """

    def __init__(self, *, patience: int, min_delta: float) -> None:
        self._patience, self._min_delta = patience, min_delta
        self.best: float | None = None  # lowest loss
        self.best_step = 0
        self.evaluations = 0  # since then

    def observe(self, step: int, loss: float) -> None:
        """Add the result of an evaluation. A loss that is NaN or infinite is not lower."""
        if math.isfinite(loss) and (
                self.best is None or (loss < self.best and self.best - loss >= self._min_delta)):
            self.best, self.best_step, self.evaluations = loss, step, 0
        else:
            self.evaluations += 1

    @property
    def is_over(self) -> bool:
        return 0 < self._patience <= self.evaluations

    def reason(self) -> str:
        """Say why the run is over."""
        delta = f" by at least {self._min_delta:g}" if self._min_delta else ""
        best = f"{self.best:.4f} at step {self.best_step}" if self.best is not None else "not finite"
        return f"the validation loss has not decreased{delta} in {self.evaluations} evaluations; the lowest was {best}"

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None if the run has no early stopping."""
        if not self._patience:
            return None
        return {"best": self.best, "best_step": self.best_step, "evaluations": self.evaluations}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Continue from the state of a checkpoint; None: from the start."""
        state = state or {}
        self.best, self.best_step = state.get("best"), state.get("best_step", 0)
        self.evaluations = state.get("evaluations", 0)


class RecipePart(Protocol):
    """A part with a state that JSON can represent."""

    def state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


def add_recipe(engine: DeepSpeedEngine, args: RunArguments) -> None:
    """Add clipping and the gradient noise scale to the update of a newly built engine, as the flags ask for."""
    update = attachments(engine).update
    if args.gradient_value_clipping:
        update.value_clipping = ValueClipping(engine, args.gradient_value_clipping)
    if args.adaptive_clipping:
        update.adaptive_clipping = AdaptiveClipping(engine, percentile=args.adaptive_clipping,
                                                    window=args.adaptive_clipping_window)
    if args.noise_scale_interval:
        update.noise_scale = NoiseScale(engine, interval=args.noise_scale_interval)


def _parts_with_state(engine: DeepSpeedEngine) -> dict[str, RecipePart]:
    own = attachments(engine)
    parts: dict[str, RecipePart | None] = {"early_stopping": own.early_stopping, "spikes": own.spikes,
                                           "adaptive_clipping": own.update.adaptive_clipping,
                                           "noise_scale": own.update.noise_scale}
    return {name: part for name, part in parts.items() if part is not None}


def recipe_states(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the states of all parts by name, for the manifest of a checkpoint. Synchronizes the device."""
    states = {name: part.state() for name, part in _parts_with_state(engine).items()}
    return {name: state for name, state in states.items() if state}


def set_recipe_states(engine: DeepSpeedEngine, states: dict[str, Any]) -> None:
    """Restore what `recipe_states` returned, in any layout. A part without a saved state starts without one."""
    for name, part in _parts_with_state(engine).items():
        part.set_state(states.get(name))


def recipe_values(engine: DeepSpeedEngine) -> dict[str, float | None]:
    """Return the values of a row of metrics.jsonl that exist with some flags only. Collective; synchronizes."""
    noise_scale = attachments(engine).update.noise_scale
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
