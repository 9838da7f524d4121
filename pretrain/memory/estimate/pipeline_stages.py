"""Layers and parameters of each pipeline stage.

This file repeats DeepSpeed 0.19.8's partitioning in plain Python (runtime/pipe/module.py, _partition_layers;
runtime/utils.py, partition_uniform and partition_balanced), because importing deepspeed takes longer than all
estimates together. tests/memory/estimate/test_pipeline_stages.py compares both.
"""

import math
import re
from functools import lru_cache
from itertools import pairwise

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import Layer, ModelShape, Tensor
from pretrain.model.flops import head_work_for_partition, keys_per_query

# Class names in model/layer_specs.py. The regular expression of "type:REGEX" is matched against these names.
_CLASS_NAMES = {"embedding": "TokenEmbedding", "positions": "PositionEmbedding", "block": "Block", "norm": "FinalNorm",
                "head": "Head"}


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
    is dynamic programming over the number of parts: each round finds, for every prefix of the items, the best way to
    cut the prefix into that many parts.
    """
    items = len(weights)
    if items <= num_parts:
        return partition_uniform(items, num_parts)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    heaviest: list[float] = [0.0] + [math.inf] * items
    lightest: list[float] = [math.inf] * (items + 1)
    last_starts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        rows = [_best_cut(sums, heaviest, lightest, part, end) for end in range(items + 1)]
        heaviest, lightest, starts = (list(column) for column in zip(*rows, strict=True))
        last_starts.append([int(start) for start in starts])
    bounds = [items]
    for part in reversed(range(num_parts)):
        bounds.append(last_starts[part][bounds[-1]])
    return bounds[::-1]


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
        last = sums[end] - sums[start]
        high, low = max(heaviest[start], last), min(lightest[start], last)
        if best >= high - low:
            best, found = high - low, (high, low, start)
    return found


def layer_work(shape: ModelShape, layer: Layer, seq_length: int) -> int:
    """Return a sixth of a layer's training FLOPs per token (model/flops.py counts the same way).

    This is the number of weights that a token is multiplied with, plus 2 * num_heads * head_size * seq_length for the
    attention scores and their product with the values. Only the experts that process the token count.
    """
    if layer.kind not in ("block", "head"):
        return 0
    experts = sum(tensor.size for tensor in layer.tensors if tensor.expert)
    idle = experts * (shape.num_experts - shape.experts_per_token) // shape.num_experts if experts else 0
    keys = keys_per_query(layer.window, seq_length) if layer.kind == "block" else 0
    attention = 2 * shape.num_heads * shape.head_size * keys
    return layer.size - idle + attention


def pipeline_stage_bounds(shape: ModelShape, layout: Layout) -> list[int]:
    """Return indices into `shape.layers()`: pipeline stage i holds the layers bounds[i] to bounds[i + 1] - 1.

    Raises:
        ConfigError: the partition method is unknown, or it leaves a pipeline stage without a layer.
    """
    return _bounds(shape, layout.pipeline_stages, layout.partition_method, layout.seq_length)


@lru_cache(maxsize=256)
def _bounds(shape: ModelShape, pipeline_stages: int, partition_method: str, seq_length: int) -> list[int]:
    layers = shape.layers()
    if pipeline_stages == 1:
        return [0, len(layers)]
    bounds = _bounds_by_method(shape, pipeline_stages, partition_method.lower(), seq_length)
    if bounds is None:
        raise ConfigError("pipeline.partition_method", found=repr(partition_method),
                          expected='"flops", "parameters", "uniform" or "type:REGEX"')
    if any(start >= end for start, end in pairwise(bounds)):
        raise ConfigError("pipeline_stages", found=f"{pipeline_stages} stages for {len(layers)} layers",
                          expected="at least one layer per pipeline stage")
    return bounds


def _bounds_by_method(shape: ModelShape, pipeline_stages: int, method: str, seq_length: int) -> list[int] | None:
    """Return the bounds that a partition method gives, or None if the method is unknown."""
    layers = shape.layers()
    if method == "uniform":
        return partition_uniform(len(layers), pipeline_stages)
    if method == "flops":
        *work, head = (layer_work(shape, layer, seq_length) for layer in layers)
        weights = [*work, head_work_for_partition(head, sum(work), shape.num_layers, pipeline_stages)]
    elif method == "parameters":
        weights = [layer.size for layer in layers]
    elif method.startswith("type:"):
        pattern = re.compile(method.split(":")[1], re.IGNORECASE)
        # A tied head is built as a second TokenEmbedding (model/layer_specs.py).
        kinds = ["embedding" if layer.tied else layer.kind for layer in layers]
        weights = [int(bool(pattern.search(_CLASS_NAMES[kind]))) for kind in kinds]
    else:
        return None
    return partition_balanced(tuple(weights), pipeline_stages)


def pipeline_stage_layers(shape: ModelShape, layout: Layout, pipeline_stage: int) -> tuple[Layer, ...]:
    """Return the layers of one pipeline stage."""
    bounds = pipeline_stage_bounds(shape, layout)
    return shape.layers()[bounds[pipeline_stage]:bounds[pipeline_stage + 1]]


def pipeline_stage_tensors(shape: ModelShape, layout: Layout, pipeline_stage: int) -> tuple[Tensor, ...]:
    """Return the parameters of one pipeline stage; a matrix that two of its layers share occurs once."""
    return tensors_of(pipeline_stage_layers(shape, layout, pipeline_stage))


def tensors_of(layers: tuple[Layer, ...]) -> tuple[Tensor, ...]:
    """Return the parameters of some layers; a matrix that two of them share occurs once."""
    tied = False
    tensors: list[Tensor] = []
    for layer in layers:
        if not (layer.tied and tied):
            tensors += layer.tensors
        tied = tied or layer.tied
    return tuple(tensors)


def local_size(tensor: Tensor, layout: Layout) -> int:
    """Return a parameter's elements on one rank after tensor and expert parallelism, before ZeRO divides it."""
    return divided_size(tensor, layout.tensor_parallel_size, layout.expert_parallel_size)


def divided_size(tensor: Tensor, tensor_parallel_size: int, expert_parallel_size: int) -> int:
    """Return a parameter's elements on one rank, rounded up, for given degrees of parallelism."""
    ranks = tensor_parallel_size if tensor.split else 1
    ranks *= expert_parallel_size if tensor.expert else 1
    return -(-tensor.size // ranks)
