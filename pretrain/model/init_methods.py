"""Initialization methods, also with muP: the standard deviation of every matrix.

The methods have the names and formulas of GPT-NeoX (megatron/model/init_functions.py). muP follows Tensor Programs V
(Yang et al., arXiv 2203.03466), table 3, for Adam and without multipliers. This file imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.model.description import ModelConfig

# projections into the residual stream
RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.down.weight", "experts.down", "shared_expert.down.weight")
INIT_METHODS = ("config", "normal", "scaled_normal", "small_init", "wang_init", "xavier_normal", "xavier_uniform")
METHODS_WITH_STD = ("config", "normal", "scaled_normal")


@dataclass(frozen=True)
class Initialization:
    """Initial weights of a new model, by the flags of the same names. The default is what its config.json says.

    With muP, a model is compared with a base model: the same layers and head size, but `mup_base_width` as hidden size,
    and heads and MLP narrower in proportion. The initial weights of the base model are those without muP.
    """

    init_method: str = "config"  # of all matrices except the projections into the residual stream
    output_init_method: str = "config"  # of the projections into the residual stream
    init_std: float | None = None  # standard deviation of METHODS_WITH_STD; None: initializer_range of the config.json
    mup_base_width: int | None = None  # None: without muP


def width_multiplier(config: ModelConfig, base_width: int | None) -> float:
    """Return the width of the model divided by the base model's; 1 without muP."""
    return 1.0 if base_width is None else config.hidden_size / base_width


def is_embedding(name: str) -> bool:
    """Return whether a parameter is the table of the tokens or of learned positions."""
    return name.endswith(".embedding")


def initial_std(name: str, shape: Sequence[int], config: ModelConfig, how: Initialization) -> float:
    """Return the standard deviation of the initial values of a matrix.

    muP keeps it for embeddings as in the base model. It divides it by the width multiplier for the output matrix, and
    by the multiplier's square root for all other matrices.
    """
    multiplier = width_multiplier(config, how.mup_base_width)
    std = _base_std(name, shape, config, how, multiplier)
    if is_embedding(name):
        return std
    return std / (multiplier if _is_output(name) else math.sqrt(multiplier))


def _is_output(name: str) -> bool:
    return name.endswith("lm_head.weight")


def _base_std(name: str, shape: Sequence[int], config: ModelConfig, how: Initialization, multiplier: float) -> float:
    """Return the standard deviation of a matrix in the base model, whose widths are divided by `multiplier`."""
    residual = name.endswith(RESIDUAL_PROJECTIONS)
    method = how.output_init_method if residual else how.init_method
    if method == "config":
        method = "scaled_normal" if residual and config.scale_residual_init else "normal"
    std, hidden = config.initializer_range if how.init_std is None else how.init_std, config.hidden_size / multiplier
    if method == "scaled_normal":  # GPT-2
        return std / math.sqrt(2 * config.num_layers)
    if method == "small_init":  # Nguyen and Salazar, arXiv 1910.05895
        return math.sqrt(2 / (5 * hidden))
    if method == "wang_init":  # Wang and Komatsuzaki, GPT-J
        return 2 / (config.num_layers * math.sqrt(hidden))
    if method in ("xavier_normal", "xavier_uniform"):  # Glorot and Bengio, 2010; the number of rows is fan-out
        has_fixed_rows = is_embedding(name) or _is_output(name)  # tokens or positions
        rows, columns = shape[-2:]  # of experts: of one expert
        return math.sqrt(2 / ((rows if has_fixed_rows else rows / multiplier) + columns / multiplier))
    return std


def is_uniform(name: str, how: Initialization) -> bool:
    """Return whether a matrix is drawn from a uniform distribution instead of a normal one."""
    return (how.output_init_method if name.endswith(RESIDUAL_PROJECTIONS) else how.init_method) == "xavier_uniform"
