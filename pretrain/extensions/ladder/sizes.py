"""Smaller models of the target's family: width and depth in the target's proportions, the same heads and vocabulary."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.errors import ConfigError, counted
from pretrain.extensions.ladder.expected_curve import counted_parameters
from pretrain.model.config import model_config_from
from pretrain.model.description import ModelConfig
from pretrain.model.families import FAMILIES

FEWEST_SIZES = 3  # of which a law in N can be fitted
_WIDTH_MULTIPLE = 8  # of inner sizes that do not divide evenly: kernels need aligned rows
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_size")
_PER_LAYER = ("layer_types", "mlp_only_layers")  # keys of a config.json with an entry for each layer, or its indices


@dataclass(frozen=True)
class Size:
    """A model of the family."""

    name: str  # of its runs: h128-l2 has a hidden size of 128 and 2 layers
    config: ModelConfig
    parameters: int  # see counted_parameters
    shape_error: float  # how far depth and heads are from the target's proportions, which need whole numbers


def family_sizes(target: ModelConfig) -> list[Size]:
    """List the models with fewer heads than the target, in ascending order. Raises ConfigError if one is impossible.

    Head size, MLP ratio, number of experts and vocabulary are the target's. So is the ratio of query heads to key and
    value heads, or the next larger one that divides the query heads.
    """
    return sorted((_size(target, heads) for heads in range(1, target.num_heads)), key=lambda size: size.parameters)


def _size(target: ModelConfig, heads: int) -> Size:
    if target.architecture not in FAMILIES:
        raise ConfigError("--target", problem=f"{target.architecture} has no family here whose keys could be scaled",
                          remedy="use a model of a family: ds-pretrain ladder scales its sizes in proportion")
    ratio, depth = target.num_heads // target.num_kv_heads, target.num_layers * heads / target.num_heads
    layers = max(1, round(depth))
    kv_heads = max(number for number in range(1, heads + 1)
                   if heads % number == 0 and number * ratio <= max(heads, ratio))
    config = scaled_config(target, heads=heads, kv_heads=kv_heads, layers=layers)
    error = abs(math.log(layers / depth)) + abs(math.log(heads / kv_heads / ratio))
    return Size(f"h{config.hidden_size}-l{layers}", config, counted_parameters(config), error)


def scaled_config(target: ModelConfig, *, heads: int, kv_heads: int, layers: int) -> ModelConfig:
    """Return the target with another number of heads and layers, and all widths in proportion. Raises ConfigError."""
    fields = {"hidden_size": target.hidden_size * heads // target.num_heads, "num_layers": layers, "num_heads": heads,
              "num_kv_heads": kv_heads, "head_size": target.head_size,
              **{name: _scaled(getattr(target, name), heads, target.num_heads) for name in _INNER}}
    known, values = FAMILIES[target.architecture].keys, dict(target.hf_config)
    for name, value in fields.items():
        if target.key(name) in known and value:
            values[target.key(name)] = value
    older = FAMILIES[target.architecture].older_keys
    replaced = {target.key(name) for name in fields}
    values = {key: value for key, value in values.items() if older.get(key) not in replaced}
    for key in _PER_LAYER:
        values.update(_cut(key, values.get(key), layers))
    return model_config_from(values, f"a model of {heads} heads and {layers} layers in the proportions of --target")


def _scaled(size: int, heads: int, of_heads: int) -> int:
    """Return heads / of_heads of an inner size, rounded to a multiple if it does not divide evenly."""
    if size * heads % of_heads == 0:
        return size * heads // of_heads
    return max(1, round(size * heads / of_heads / _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE


def _cut(key: str, value: Any, layers: int) -> dict[str, Any]:
    """Return the first `layers` entries of a list with one for each layer, or of indices those below `layers`."""
    if not isinstance(value, list):
        return {}
    kept = value[:layers]
    return {key: [index for index in value if index < layers] if all(isinstance(each, int) for each in value) else kept}


def choose_sizes(sizes: Sequence[Size], *, largest: float, spread: float, count: int) -> list[Size]:
    """Return up to `count` models whose numbers of parameters are nearest to a geometric series.

    The series ends with the largest model of at most `largest` parameters, and begins at a `spread`-th of it. Of
    models that are about as near, the one that is nearer to the target's proportions is taken.
    """
    possible = [size for size in sizes if size.parameters <= largest]
    if not possible:
        return []
    end = possible[-1].parameters
    wanted = [end * spread ** (-index / (count - 1)) for index in reversed(range(count))]
    found = [possible[-1] if number == end else
             min(possible, key=lambda size: abs(math.log(size.parameters / number)) + size.shape_error)
             for number in wanted]
    return sorted({size.name: size for size in found}.values(), key=lambda size: size.parameters)


def nearest_sizes(sizes: Sequence[Size], wanted: Iterable[float]) -> list[Size]:
    """Return the models that are nearest to the numbers of --parameters. Raises ConfigError if they are too few."""
    found = {min(sizes, key=lambda size: abs(math.log(size.parameters / number))).name for number in wanted} \
        if sizes else set()
    if len(found) < FEWEST_SIZES:
        known = ", ".join(f"{size.parameters:,}" for size in sizes[:12]) or "none"
        raise ConfigError("--parameters", problem=f"it names {counted(len(found), 'different model')}; the fit needs "
                          f"at least {FEWEST_SIZES}",
                          remedy="smaller models of the target's family have these numbers of parameters: "
                                 f"{known}{', ...' if len(sizes) > 12 else ''}")
    return [size for size in sizes if size.name in found]
