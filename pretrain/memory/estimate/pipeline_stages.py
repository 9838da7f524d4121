"""Which layers, and so which parameters, a rank holds: pipeline stages, tensor and expert parallelism.

What specs.as_pipeline and DeepSpeed's own partitioning (runtime/pipe/module.py, _partition_layers; runtime/utils.py,
partition_balanced) do is written out here without numpy, as importing deepspeed takes longer than all estimates
together.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import Layer, ModelShape, Tensor
from pretrain.model.flops import head_to_cut_by

# The classes of build_specs, which "type:REGEX" is compared with.
_CLASSES = {"embedding": "TokenEmbedding", "positions": "PositionEmbedding", "block": "Block", "norm": "FinalNorm",
            "head": "Head"}


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters of a rank that ZeRO flattens and divides together: an optimizer parameter group."""

    sizes: tuple[int, ...]  # elements of each parameter, in the order of registration, on this rank before ZeRO
    ranks: int  # over which ZeRO divides them
    matrices: bool  # False: norms and biases
    inner_size: int = 0  # elements of its matrices but embeddings and head, those that Muon orthogonalises

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Elements of the first i + 1 parameters."""
        return tuple(accumulate(self.sizes))

    @property
    def size(self) -> int:
        """Elements of all its parameters."""
        return self.ends[-1]

    @cached_property
    def largest(self) -> int:
        """Elements of its largest parameter."""
        return max(self.sizes)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Elements of each parameter's part at stage 3 (zero/partition_parameters.py, _aligned_size)."""
        return tuple(-(-size // self.ranks) for size in self.sizes)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The num_parts + 1 bounds of parts of about equal length (deepspeed/runtime/utils.py, partition_uniform)."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    chunk, residual = divmod(num_items, num_parts)
    return [part * chunk + min(part, residual) for part in range(num_parts + 1)]


@lru_cache(maxsize=256)
def partition_balanced(weights: tuple[int, ...], num_parts: int) -> list[int]:
    """The bounds of parts of least (largest - smallest) weight; the last of equal solutions, as DeepSpeed takes it
    (deepspeed/runtime/utils.py, partition_balanced).
    """
    items = len(weights)
    if items <= num_parts:
        return partition_uniform(items, num_parts)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # of the best way to cut the first i items into j parts, for growing j: largest part, smallest part, last bound
    largest: list[float] = [0.0] + [math.inf] * items
    smallest: list[float] = [math.inf] * (items + 1)
    bounds: list[list[int]] = []
    for part in range(1, num_parts + 1):
        rows = [_best_cut(sums, largest, smallest, part, end) for end in range(items + 1)]
        largest, smallest, last = (list(column) for column in zip(*rows, strict=True))
        bounds.append([int(bound) for bound in last])
    cuts = [items]
    for part in reversed(range(num_parts)):
        cuts.append(bounds[part][cuts[-1]])
    return cuts[::-1]


def _best_cut(sums: list[int], largest: list[float], smallest: list[float], part: int,
              end: int) -> tuple[float, float, int]:
    """(largest, smallest, start of the last part) of the first `end` items cut into `part` parts."""
    best, found = math.inf, (math.inf, math.inf, 0)
    for start in range(part - 1, min(end, 1) if part == 1 else end):
        last = sums[end] - sums[start]
        high, low = max(largest[start], last), min(smallest[start], last)
        if best >= high - low:
            best, found = high - low, (high, low, start)
    return found


def pipeline_stage_bounds(shape: ModelShape, layout: Layout) -> list[int]:
    """Indices into `shape.layers()`: stage i holds those from bounds[i] to before bounds[i + 1].

    Raises:
        ConfigError: a partition method that is not known, or one that leaves a stage without a layer.
    """
    return _bounds(shape, layout.pipeline_stages, layout.partition_method, layout.seq_length)


def layer_work(shape: ModelShape, layer: Layer, seq_length: int) -> int:
    """A sixth of a layer's FLOPs a token (model/flops.py): elements that a token is multiplied with, and 2 heads *
    head_size * T for attention; of experts those that a token passes.
    """
    if layer.kind not in ("block", "head"):
        return 0
    experts = sum(tensor.size for tensor in layer.tensors if tensor.expert)
    idle = experts * (shape.num_experts - shape.experts_per_token) // shape.num_experts if experts else 0
    attention = 2 * shape.num_heads * shape.head_size * seq_length if layer.kind == "block" else 0
    return layer.size - idle + attention


@lru_cache(maxsize=256)
def _bounds(shape: ModelShape, stages: int, partition_method: str, seq_length: int) -> list[int]:
    layers, method = shape.layers(), partition_method.lower()
    if stages == 1:
        return [0, len(layers)]
    if method == "flops":
        *work, head = (layer_work(shape, layer, seq_length) for layer in layers)
        bounds = partition_balanced((*work, head_to_cut_by(head, sum(work), shape.num_layers, stages)), stages)
    elif method == "uniform":
        bounds = partition_uniform(len(layers), stages)
    elif method == "parameters":
        bounds = partition_balanced(tuple(layer.size for layer in layers), stages)
    elif method.startswith("type:"):
        pattern = re.compile(method.split(":")[1], re.IGNORECASE)
        kinds = ["embedding" if layer.tied else layer.kind for layer in layers]
        bounds = partition_balanced(tuple(int(bool(pattern.search(_CLASSES[kind]))) for kind in kinds), stages)
    else:
        raise ConfigError("pipeline.partition_method", found=repr(partition_method),
                          expected='"flops", "parameters", "uniform" or "type:REGEX"')
    if any(start >= end for start, end in pairwise(bounds)):
        raise ConfigError("pipeline_stages", found=f"{stages} stages for {len(layers)} layers",
                          expected="a layer for each of them")
    return bounds


def pipeline_stage_layers(shape: ModelShape, layout: Layout, pipeline_stage: int) -> tuple[Layer, ...]:
    """The layers of one pipeline stage."""
    bounds = pipeline_stage_bounds(shape, layout)
    return shape.layers()[bounds[pipeline_stage]:bounds[pipeline_stage + 1]]


def pipeline_stage_tensors(shape: ModelShape, layout: Layout, pipeline_stage: int) -> tuple[Tensor, ...]:
    """The parameters of one stage, a tied matrix once."""
    return _tensors(pipeline_stage_layers(shape, layout, pipeline_stage))


def _tensors(layers: tuple[Layer, ...]) -> tuple[Tensor, ...]:
    tied = False
    tensors: list[Tensor] = []
    for layer in layers:
        if not (layer.tied and tied):
            tensors += layer.tensors
        tied = tied or layer.tied
    return tuple(tensors)


def local_size(tensor: Tensor, layout: Layout) -> int:
    """Elements of a parameter on one rank before ZeRO: after tensor and expert parallelism."""
    return _local_size(tensor, layout.tensor_parallel_size, layout.expert_parallel_size)


def _local_size(tensor: Tensor, tensor_parallel_size: int, expert_parallel_size: int) -> int:
    shared = tensor_parallel_size if tensor.split else 1
    shared *= expert_parallel_size if tensor.expert else 1
    return -(-tensor.size // shared)


def rank_groups(shape: ModelShape, layout: Layout, pipeline_stage: int) -> tuple[Group, ...]:
    """Parameter groups of one stage: matrices and vectors, those of experts apart, none that is empty."""
    return _groups(pipeline_stage_layers(shape, layout, pipeline_stage), layout.tensor_parallel_size,
                   layout.expert_parallel_size, layout.zero_size)


@lru_cache(maxsize=256)
def _groups(layers: tuple[Layer, ...], tensor_parallel_size: int, expert_parallel_size: int,
            zero_size: int) -> tuple[Group, ...]:
    found: dict[tuple[bool, bool], list[tuple[int, bool]]] = {}
    for tensor in _tensors(layers):
        size = _local_size(tensor, tensor_parallel_size, expert_parallel_size)
        outer = "embed" in tensor.name or "lm_head" in tensor.name
        found.setdefault((not tensor.is_matrix, tensor.expert), []).append((size, outer))
    return tuple(Group(tuple(size for size, _ in rows), max(1, zero_size // (expert_parallel_size if expert else 1)),
                       not vectors, 0 if vectors else sum(size for size, outer in rows if not outer))
                 for (vectors, expert), rows in sorted(found.items()))
