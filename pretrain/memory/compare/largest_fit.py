"""The largest model, sequence or micro-batch that fits a layout, found by bisection."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.compare.candidates import Candidate
from pretrain.memory.compare.compare import Workload, memory_shortage
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.model.description import ModelConfig

FIND_TARGETS = ("max_model", "max_seq", "max_micro_batch")
_SEQ_STEP = 64  # tokens
_PARAMETERS_STEP = 50_000_000
_MAX_STEPS = {"max_model": 2**14, "max_seq": 2**18, "max_micro_batch": 2**16}


@dataclass(frozen=True)
class LargestFit:
    """The largest size that fits one layout."""

    candidate: Candidate
    kind: str  # one of FIND_TARGETS
    value: int  # parameters, tokens or samples; 0: not even the smallest size fits
    detail: str  # the model's sizes, and the memory that the next larger size lacks
    reached_end: bool  # True: the search ended at its own upper limit, so a larger size may fit as well


def find_largest(kind: str, candidates: Iterable[Candidate], workload: Workload) -> list[LargestFit]:
    """Find the largest size for each layout. Raises ConfigError if a model's shape is needed and missing."""
    if kind not in FIND_TARGETS:
        raise ConfigError("--find", found=repr(kind), expected=f"one of {', '.join(FIND_TARGETS)}")
    if workload.shape is None and kind != "max_model":
        raise ConfigError("--find", problem=f"{kind} needs the shape of a model",
                          remedy="give --model instead of --num_parameters, or use --find max_model")
    return [_largest(kind, candidate, workload) for candidate in candidates]


def _largest(kind: str, candidate: Candidate, workload: Workload) -> LargestFit:
    """Find the largest size for one layout."""
    def shortage(step: int) -> str:
        shape, layout, size = _at_step(kind, step, candidate.layout, workload)
        memory = estimate_memory(shape, layout, num_parameters=None if shape else size)
        return memory_shortage(memory, workload.cluster)

    best = bisect(lambda step: not shortage(step), _MAX_STEPS[kind])
    reached_end = best == _MAX_STEPS[kind]
    shape, _, size = _at_step(kind, max(best, 1), candidate.layout, workload)
    detail = [] if reached_end else [shortage(best + 1)]
    if kind == "max_model" and shape is not None and best:
        detail.insert(0, f"{shape.num_layers} layers, width {shape.hidden_size}")
    return LargestFit(candidate, kind, size if best else 0, "; then ".join(detail), reached_end)


def bisect(fits: Callable[[int], bool], last: int) -> int:
    """Return the largest step from 1 to `last` that fits, or 0 if none fits.

    The search assumes that all steps below a step that fits fit as well.
    """
    low, high = 0, 1
    while high <= last and fits(high):
        low, high = high, 2 * high
    high = min(high, last + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _at_step(kind: str, step: int, layout: Layout, workload: Workload) -> tuple[ModelConfig | None, Layout, int]:
    """Return (shape, layout, size) of one step of the search."""
    shape = workload.shape
    if kind == "max_micro_batch":
        return shape, replace(layout, micro_batch_size=step), step
    if kind == "max_seq":
        tokens = step * math.lcm(_SEQ_STEP, layout.sequence_parallel_size)
        assert shape is not None
        return replace(shape, max_positions=tokens), replace(layout, seq_length=tokens), tokens
    if shape is None:
        return None, layout, step * _PARAMETERS_STEP
    scaled = scaled_shape(shape, step, layout)
    return scaled, layout, scaled.num_parameters()


def scaled_shape(shape: ModelConfig, step: int, layout: Layout) -> ModelConfig:
    """Return a model with the same proportions in another size: depth grows with width, head_size is unchanged.

    Each step adds the smallest possible number of heads: complete key/value groups for each tensor-parallel rank, and
    a multiple of the sequence-parallel ranks.
    """
    group = max(1, shape.num_heads // max(1, shape.num_kv_heads))
    heads = step * math.lcm(group * layout.tensor_parallel_size, layout.sequence_parallel_size)
    factor = heads / shape.num_heads

    def scaled(size: int) -> int:
        return 0 if size == 0 else max(1, round(size * factor))

    layers = max(layout.pipeline_stages, scaled(shape.num_layers))
    return replace(
        shape, hidden_size=round(shape.hidden_size * factor), num_heads=heads, num_kv_heads=max(1, heads // group),
        num_layers=layers, intermediate_size=scaled(shape.intermediate_size),
        moe_intermediate_size=scaled(shape.moe_intermediate_size), shared_expert_size=scaled(shape.shared_expert_size),
        windows=tuple(shape.windows[index % len(shape.windows)] for index in range(layers if shape.windows else 0)),
        dense_layers=frozenset(index for index in shape.dense_layers if index < layers))
