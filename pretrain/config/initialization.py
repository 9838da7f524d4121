"""Flags of initial weights, muP and dropout: applied to the model, and checked against it and the DeepSpeed JSON."""

from dataclasses import replace
from typing import Any

from pretrain.config.flags.arguments import RunArguments
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.init_methods import METHODS_WITH_STD, Initialization, width_multiplier

DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")  # flags, and fields of ModelConfig
# Their update of a weight does not depend on the size of its gradient (Yang et al., arXiv 2203.03466, appendix B.3).
_MUP_OPTIMIZERS = ("adam", "adamw", "lion")


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
    """Raise ConfigError for flags of initial values without an effect, and for dropouts that are no probabilities."""
    if args.init_std is not None and not {args.init_method, args.output_init_method} & {*METHODS_WITH_STD}:
        raise ConfigError("--init_std", problem=f"{args.init_method} and {args.output_init_method} have standard "
                          "deviations of their own", remedy=f"only {', '.join(METHODS_WITH_STD)} use this flag")
    if args.init_from is not None:
        reject_initial_values(args, f"the initial weights are those of --init_from {args.init_from}")
    for name in DROPOUTS:
        value = getattr(args, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"--{name}", found=value, expected="a probability from 0 to below 1")


def reject_initial_values(args: RunArguments, reason: str) -> None:
    """Raise ConfigError if a flag selects the initial values of weights that are loaded instead."""
    for name in ("init_method", "output_init_method", "init_std"):
        if getattr(args, name) != getattr(RunArguments, name):
            raise ConfigError(f"--{name}", problem=f"it has no effect: {reason}", remedy="leave the flag out")


def check_mup(run: ResolvedConfig) -> None:
    """Reject muP for models and optimizers whose widths or learning rates it would not scale correctly."""
    width, model = run.args.mup_base_width, run.model
    if width is None:
        return
    heads = model.num_heads / width_multiplier(model, width)
    if heads < 1 or heads != int(heads):
        raise ConfigError("--mup_base_width", found=width, expected=f"a multiple of {_base_widths(model)}: the base "
                          f"model has the same head size ({model.head_size}), and a whole number of heads")
    if model.tie_word_embeddings:
        raise ConfigError("--mup_base_width", problem="the output matrix is that of the embeddings, but muP needs "
                          "another initial deviation and learning rate for it",
                          remedy="give --model_overrides tie_word_embeddings=false")
    if model.embedding_scale != 1:
        raise ConfigError("--mup_base_width", problem=f"{model.architecture} multiplies the embeddings by "
                          f"{model.embedding_scale:g}, which depends on the width", remedy="leave the flag out")
    if run.layout.optimizer not in _MUP_OPTIMIZERS:
        raise run.error("optimizer.type", expected="Adam, AdamW or Lion with --mup_base_width",
                        remedy="the learning rates of muP are different for other optimizers")
    if run.schedule is None:
        raise run.error("scheduler", problem="it sets one learning rate for all parameters, but --mup_base_width needs "
                        "several", remedy='remove the "scheduler" block, and use --lr_schedule')


def _base_widths(model: ModelConfig) -> str:
    """Return the smallest base width with a whole number of heads, if hidden_size is a multiple of num_heads."""
    return f"{model.hidden_size / model.num_heads:g}"
