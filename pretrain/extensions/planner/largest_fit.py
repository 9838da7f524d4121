"""The largest model, sequence or micro-batch that fits a layout, found by bisection."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError, counted
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
    """Find the largest size for each layout. Raises ConfigError if the model is needed and missing."""
    if kind not in FIND_TARGETS:
        raise ConfigError("--find", found=repr(kind), expected=f"one of {', '.join(FIND_TARGETS)}")
    if workload.model is None and kind != "max_model":
        raise ConfigError("--find", problem=f"{kind} needs the shape of a model",
                          remedy="give --model instead of --num_parameters, or use --find max_model")
    return [_largest(kind, candidate, workload) for candidate in candidates]


def _largest(kind: str, candidate: Candidate, workload: Workload) -> LargestFit:
    """Find the largest size for one layout."""
    def shortage(step: int) -> str:
        model, layout, size = _at_step(kind, step, candidate.layout, workload)
        memory = estimate_memory(model, layout, num_parameters=size)
        return memory_shortage(memory, workload.cluster)

    best = bisect(lambda step: not shortage(step), _MAX_STEPS[kind])
    reached_end = best == _MAX_STEPS[kind]
    model, _, size = _at_step(kind, max(best, 1), candidate.layout, workload)
    detail = [] if reached_end else [shortage(best + 1)]
    if kind == "max_model" and model is not None and best:
        detail.insert(0, f"{counted(model.num_layers, 'layer')}, width {model.hidden_size}")
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
    """Return (model, layout, size) of one step of the search."""
    model = workload.model
    if kind == "max_micro_batch":
        return model, replace(layout, micro_batch_size=step), step
    if kind == "max_seq":
        tokens = step * math.lcm(_SEQ_STEP, layout.sequence_parallel_size)
        assert model is not None
        return replace(model, max_positions=tokens), replace(layout, seq_length=tokens), tokens
    if model is None:
        return None, layout, step * _PARAMETERS_STEP
    scaled = scaled_model(model, step, layout)
    return scaled, layout, scaled.num_parameters()


def scaled_model(model: ModelConfig, step: int, layout: Layout) -> ModelConfig:
    """Return a model with the same proportions in another size: depth grows with width, head_size is unchanged.

    Each step adds the smallest possible number of heads: complete key/value groups for each tensor-parallel rank, and
    a multiple of the sequence-parallel ranks.
    """
    group = max(1, model.num_heads // max(1, model.num_kv_heads))
    heads = step * math.lcm(group * layout.tensor_parallel_size, layout.sequence_parallel_size)
    factor = heads / model.num_heads

    def scaled(size: int) -> int:
        return 0 if size == 0 else max(1, round(size * factor))

    layers = max(layout.pipeline_stages, scaled(model.num_layers))
    return replace(
        model, hidden_size=round(model.hidden_size * factor), num_heads=heads, num_kv_heads=max(1, heads // group),
        num_layers=layers, intermediate_size=scaled(model.intermediate_size),
        moe_intermediate_size=scaled(model.moe_intermediate_size), shared_expert_size=scaled(model.shared_expert_size),
        windows=tuple(model.windows[index % len(model.windows)] for index in range(layers if model.windows else 0)),
        dense_layers=frozenset(index for index in model.dense_layers if index < layers))
