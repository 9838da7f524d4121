"""Flags of initial weights, muP and dropout: applied to the model."""

from dataclasses import replace
from typing import Any

from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.init_methods import METHODS_WITH_STD, Initialization

DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")  # flags, and fields of ModelConfig


def initialization_of(args: RunArguments) -> Initialization:
    """Return the initialization that the flags describe."""
    return Initialization(args.init_method, args.output_init_method, args.init_std, args.mup_base_width)


def given_dropouts(flags: object) -> dict[str, Any]:
    """Return the dropouts that the flags set, by their names in ModelConfig and ModelShape."""
    return {name: getattr(flags, name) for name in DROPOUTS if getattr(flags, name) is not None}


def with_dropout(model: ModelConfig, flags: object) -> ModelConfig:
    """Return the model with the dropouts of the flags. Its `hf_config`, which exports write, is unchanged."""
    return replace(model, **given_dropouts(flags))


def check_initialization_flags(args: RunArguments) -> None:
    """Raise ConfigError for flags of initial values without an effect."""
    if args.init_std is not None and not {args.init_method, args.output_init_method} & {*METHODS_WITH_STD}:
        raise ConfigError("--init_std", problem=f"{args.init_method} and {args.output_init_method} have standard "
                          "deviations of their own", remedy=f"only {', '.join(METHODS_WITH_STD)} use this flag")
    if args.init_from is not None:
        reject_initial_values(args, f"the initial weights are those of --init_from {args.init_from}")


def reject_initial_values(args: RunArguments, reason: str) -> None:
    """Raise ConfigError if a flag selects the initial values of weights that are loaded instead."""
    for name in ("init_method", "output_init_method", "init_std"):
        if getattr(args, name) != getattr(RunArguments, name):
            raise ConfigError(f"--{name}", problem=f"it has no effect: {reason}", remedy="leave the flag out")
