"""The parts of the training recipe that an engine has in addition to DeepSpeed's, with states in checkpoints."""

from typing import Any, Protocol

from deepspeed import DeepSpeedEngine

from pretrain.config.flags.arguments import RunArguments
from pretrain.engine.recipe.adaptive_clipping import AdaptiveClipping
from pretrain.engine.recipe.early_stopping import EarlyStopping
from pretrain.engine.recipe.loss_terms import loss_term_values
from pretrain.engine.recipe.noise_scale import NoiseScale
from pretrain.engine.recipe.value_clipping import clip_gradient_values
from pretrain.engine.steps import loss_scale


class RecipePart(Protocol):
    """A part with a state that JSON can represent."""

    def state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


def add_recipe(engine: DeepSpeedEngine, args: RunArguments) -> None:
    """Add clipping, the gradient noise scale and early stopping to a newly built engine, as the flags ask for."""
    if args.gradient_value_clipping:
        clip_gradient_values(engine, args.gradient_value_clipping, lambda: loss_scale(engine))
    engine.early_stopping = EarlyStopping(patience=args.early_stopping_patience,
                                          min_delta=args.early_stopping_min_delta)
    engine.recipe_parts = {"early_stopping": engine.early_stopping}
    if args.adaptive_clipping:
        engine.adaptive_clipping = AdaptiveClipping(engine, percentile=args.adaptive_clipping,
                                                    window=args.adaptive_clipping_window)
        engine.recipe_parts["adaptive_clipping"] = engine.adaptive_clipping
    if args.noise_scale_interval:
        engine.recipe_parts["noise_scale"] = NoiseScale(engine, interval=args.noise_scale_interval)


def recipe_states(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the states of all parts by name, for the manifest of a checkpoint. Synchronizes the device."""
    parts: dict[str, RecipePart] = engine.recipe_parts
    states = {name: part.state() for name, part in parts.items()}
    return {name: state for name, state in states.items() if state}


def set_recipe_states(engine: DeepSpeedEngine, states: dict[str, Any]) -> None:
    """Restore what `recipe_states` returned, in any layout. A part without a saved state starts without one."""
    parts: dict[str, RecipePart] = engine.recipe_parts
    for name, part in parts.items():
        part.set_state(states.get(name))


def recipe_values(engine: DeepSpeedEngine) -> dict[str, float | None]:
    """Return the values of a row of metrics.jsonl that exist with some flags only. Collective; synchronizes."""
    noise_scale = engine.recipe_parts.get("noise_scale")
    return {**loss_term_values(engine), **({} if noise_scale is None else {"noise_scale": noise_scale.value()})}
