"""Division of a model's layers into pipeline stages, in plain Python: the engine and the estimates use the same one.

`partition_uniform` and `partition_balanced` repeat DeepSpeed 0.19.8's functions of the same names (runtime/utils.py),
because importing deepspeed takes longer than all estimates together. tests/model/test_partition.py compares both.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from pretrain.errors import ConfigError
from pretrain.model.description import ModelConfig
from pretrain.model.flops import head_work_for_partition, layer_flops_per_token

BY_FLOPS, BY_PARAMETERS, UNIFORM, BY_TIME, BY_TYPE = "flops", "parameters", "uniform", "time", "type:"
METHODS = f'"{BY_FLOPS}", "{BY_PARAMETERS}", "{BY_TIME}", "{UNIFORM}" or "{BY_TYPE}REGEX"'


@dataclass(frozen=True)
class LayerCost:
    """Cost of a layer of model/layer_specs.py, by which the layers are divided into pipeline stages."""

    class_name: str  # in model/layers/block.py and model/layers/norm.py; a tied head is a second TokenEmbedding
    parameters: int  # elements; a tied matrix counts in both of its layers, as both stages hold it
    work: int  # FLOPs per token in any unit; look-ups and norms count as 0

    @property
    def is_block(self) -> bool:
        return self.class_name == "Block"


def layer_costs(config: ModelConfig, seq_length: int) -> tuple[LayerCost, ...]:
    """Return the costs of all layers. Sequences have `seq_length` tokens."""
    layers = config.layers()
    costs = {layer: LayerCost(layer.class_name, layer.size, layer_flops_per_token(config, layer, seq_length))
             for layer in dict.fromkeys(layers)}
    return tuple(costs[layer] for layer in layers)


def stage_bounds(layers: Sequence[LayerCost], *, num_stages: int, method: str,
                 times: Sequence[int] = ()) -> list[int]:
    """Return the num_stages + 1 bounds: pipeline stage i holds the layers bounds[i] to bounds[i + 1] - 1.

    Args:
        method: one of METHODS. "type:REGEX" gives each stage about the same number of layers whose class name matches
            (anywhere in the name, in upper or lower case).
        times: for "time": forward and backward time of each layer, nanoseconds; without times, the FLOPs are used.

    Raises:
        ConfigError: the method is unknown, or there are fewer layers than stages, or no class name matches.
    """
    if num_stages == 1:
        return [0, len(layers)]
    if method == UNIFORM:
        bounds = partition_uniform(len(layers), num_stages)
    elif method == BY_TIME:
        bounds = partition_by_time(tuple(times or (layer.work for layer in layers)),
                                   tuple(layer.is_block for layer in layers), num_stages)
    else:
        bounds = partition_balanced(tuple(_weights(layers, num_stages, method)), num_stages)
    if any(start >= end for start, end in pairwise(bounds)):
        raise ConfigError("pipeline_stages", found=f"{num_stages} stages for {len(layers)} layers",
                          expected="at least one layer per pipeline stage")
    return bounds


def _weights(layers: Sequence[LayerCost], num_stages: int, method: str) -> list[int]:
    if method == BY_FLOPS:
        blocks = [layer.work for layer in layers if layer.is_block]
        head = head_work_for_partition(layers[-1].work, sum(blocks), len(blocks), num_stages)
        return [*(layer.work for layer in layers[:-1]), head]
    if method == BY_PARAMETERS:
        return [layer.parameters for layer in layers]
    pattern = layer_pattern(method)
    if pattern is None:
        raise ConfigError("pipeline.partition_method", found=repr(method), expected=METHODS)
    return [int(bool(pattern.search(layer.class_name))) for layer in layers]


def layer_pattern(method: str) -> re.Pattern[str] | None:
    """Return the regular expression of "type:REGEX"; None for anything else.

    DeepSpeed 0.19.8 converts the expression to lower case and cuts it at the next colon. This function does neither.
    """
    if method[:len(BY_TYPE)].lower() != BY_TYPE:
        return None
    try:
        return re.compile(method[len(BY_TYPE):], re.IGNORECASE)
    except (re.error, OverflowError, RecursionError):
        return None


def stage_without_block(layers: Sequence[LayerCost], bounds: Sequence[int]) -> int | None:
    """Return the first pipeline stage that holds no block, or None."""
    return next((stage for stage, (start, end) in enumerate(pairwise(bounds))
                 if not any(layer.is_block for layer in layers[start:end])), None)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the num_parts + 1 bounds of parts of nearly equal length (DeepSpeed's partition_uniform)."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    chunk, residual = divmod(num_items, num_parts)
    return [part * chunk + min(part, residual) for part in range(num_parts + 1)]


@lru_cache(maxsize=256)
def partition_balanced(weights: tuple[int, ...], num_parts: int) -> list[int]:
    """Return the num_parts + 1 bounds that minimise (heaviest part - lightest part).

    If several solutions are equally good, the last one is returned, as in DeepSpeed's partition_balanced. The algorithm
    is dynamic programming over the number of parts, see `_balanced_prefixes`.
    """
    items = len(weights)
    if items <= num_parts:
        return partition_uniform(items, num_parts)
    return _bounds_of([_balanced_prefixes(weights, parts).starts for parts in range(1, num_parts + 1)], items)


class _Prefixes(NamedTuple):
    """The best way to cut each prefix of some items into a number of parts, by the number of items in the prefix."""

    heaviest: list[float]  # weight of the heaviest part
    lightest: list[float]
    starts: list[int]  # index of the first item of the last part


@lru_cache(maxsize=512)  # a larger number of parts uses the results of the smaller ones, and so do other calls
def _balanced_prefixes(weights: tuple[int, ...], parts: int) -> _Prefixes:
    items = len(weights)
    if parts == 0:
        return _Prefixes([0.0] + [math.inf] * items, [math.inf] * (items + 1), [0] * (items + 1))
    before, sums = _balanced_prefixes(weights, parts - 1), [0, *accumulate(weights)]
    cuts = [_best_cut(sums, before.heaviest, before.lightest, parts, end) for end in range(items + 1)]
    return _Prefixes([high for high, _, _ in cuts], [low for _, low, _ in cuts], [start for _, _, start in cuts])


def _best_cut(sums: list[int], heaviest: list[float], lightest: list[float], part: int,
              end: int) -> tuple[float, float, int]:
    """Cut the first `end` items into `part` parts; return (heaviest, lightest, start of the last part).

    Args:
        sums: prefix sums of the weights, [items + 1].
        heaviest: weight of the heaviest of `part` - 1 parts, by the number of items in them, [items + 1].
        lightest: the same for the lightest part.
    """
    best, found = math.inf, (math.inf, math.inf, 0)
    for start in range(part - 1, min(end, 1) if part == 1 else end):
        last, high, low = sums[end] - sums[start], heaviest[start], lightest[start]
        high = last if last > high else high  # max() and min() take several times as long
        low = last if last < low else low
        if best >= high - low:
            best, found = high - low, (high, low, start)
    return found


@lru_cache(maxsize=256)
def partition_by_time(times: tuple[int, ...], is_block: tuple[bool, ...], num_parts: int) -> list[int]:
    """Return the num_parts + 1 bounds that minimise the slowest part, with at least one block in each part.

    The slowest stage of a pipeline determines its speed. Of equally good solutions, the one with the smallest sum of
    squares is returned, then the one whose last stages begin earliest. So equal times always give equal bounds.
    """
    items = len(times)
    sums, blocks = [0, *accumulate(times)], [0, *accumulate(is_block)]
    best: list[tuple[float, float]] = [(0, 0)] + [(math.inf, math.inf)] * items
    last_starts: list[list[int]] = []
    for _ in range(num_parts):
        rows = []
        for end in range(items + 1):
            cuts = (((max(best[start][0], part := sums[end] - sums[start]), best[start][1] + part * part), start)
                    for start in range(end) if blocks[start] < blocks[end] and best[start][0] < math.inf)
            rows.append(min(cuts, default=((math.inf, math.inf), 0)))
        best, starts = [cost for cost, _ in rows], [start for _, start in rows]
        last_starts.append(starts)
    return _bounds_of(last_starts, items)


def _bounds_of(last_starts: list[list[int]], items: int) -> list[int]:
    """Return the bounds from the start of the last part, for each number of parts and of items in them."""
    bounds = [items]
    for starts in reversed(last_starts):
        bounds.append(starts[bounds[-1]])
    return bounds[::-1]
