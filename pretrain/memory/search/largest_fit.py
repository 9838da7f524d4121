"""The largest model, sequence or micro-batch that fits a layout; and the recommended JSON as a file."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.rank_memory import estimate_memory
from pretrain.memory.search.combinations import Candidate
from pretrain.memory.search.compare import ComparisonRow, Workload, memory_shortage

FIND_TARGETS = ("max_model", "max_seq", "max_micro_batch")
_SEQ_STEP = 64  # tokens
_MOST = {"max_model": 2**14, "max_seq": 2**18, "max_micro_batch": 2**16}  # steps of the search


@dataclass(frozen=True)
class LargestFit:
    """The largest that fits one layout. Numbers of it are 0 where not even the smallest fits."""

    candidate: Candidate
    kind: str
    value: int  # parameters, tokens or samples
    detail: str  # what the next larger one lacks, and the model's sizes
    reached_end: bool  # the search ended before anything was too large


def find_largest(kind: str, candidates: Iterable[Candidate], workload: Workload) -> list[LargestFit]:
    """For each layout, by bisection; what fits is taken to fit in every smaller size too."""
    if kind not in FIND_TARGETS:
        raise ConfigError("--find", found=repr(kind), expected=f"one of {', '.join(FIND_TARGETS)}")
    if workload.shape is None and kind != "max_model":
        raise ConfigError("--find", found=f"{kind} without a model", expected="max_model, or --model",
                          remedy="sequences and micro-batches need the model's shape")
    return [_largest(kind, candidate, workload) for candidate in candidates]


def _largest(kind: str, candidate: Candidate, workload: Workload) -> LargestFit:
    def lacking(step: int) -> str:
        shape, layout, number = _sized(kind, step, candidate.layout, workload)
        found = estimate_memory(shape, layout, num_parameters=None if shape else number)
        return memory_shortage(found, workload.cluster)

    best = bisect(lambda step: not lacking(step), _MOST[kind])
    reached_end = best == _MOST[kind]
    shape, _, number = _sized(kind, max(best, 1), candidate.layout, workload)
    detail = [] if reached_end else [lacking(best + 1)]
    if kind == "max_model" and shape is not None and best:
        detail.insert(0, f"{shape.num_layers} layers, width {shape.hidden_size}")
    return LargestFit(candidate, kind, number if best else 0, "; then ".join(detail), reached_end)


def bisect(fits: Callable[[int], bool], most: int) -> int:
    """The largest step from 1 to `most` that fits; 0: none."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _sized(kind: str, step: int, layout: Layout, workload: Workload) -> tuple[ModelShape | None, Layout, int]:
    """(shape, layout, the number looked for) of the search's step."""
    shape = workload.shape
    if kind == "max_micro_batch":
        return shape, replace(layout, micro_batch_size=step), step
    if kind == "max_seq":
        tokens = step * math.lcm(_SEQ_STEP, layout.sequence_parallel_size)
        assert shape is not None
        longer = replace(shape, max_positions=tokens,
                         position_rows=tokens if shape.position == "learned" else shape.position_rows)
        return longer, replace(layout, seq_length=tokens), tokens
    if shape is None:
        number = step * 50_000_000
        return None, layout, number
    scaled = scaled_shape(shape, step, layout)
    return scaled, layout, scaled.num_parameters()


def scaled_shape(shape: ModelShape, step: int, layout: Layout) -> ModelShape:
    """The same proportions in another size: depth grows with the width, the size of a head stays.

    Step by step the number of heads grows by the least that keeps groups of keys and tensor-parallel ranks whole.
    """
    group = max(1, shape.num_heads // max(1, shape.num_kv_heads))
    heads = step * math.lcm(group, layout.tensor_parallel_size * layout.sequence_parallel_size)
    factor = heads / shape.num_heads
    hidden = round(shape.hidden_size * factor)

    def scaled(size: int) -> int:
        return 0 if size == 0 else max(1, round(size * factor))

    layers = max(layout.pipeline_stages, scaled(shape.num_layers))
    return replace(
        shape, hidden_size=hidden, num_heads=heads, num_kv_heads=max(1, heads // group), num_layers=layers,
        intermediate_size=scaled(shape.intermediate_size), moe_intermediate_size=scaled(shape.moe_intermediate_size),
        shared_expert_size=scaled(shape.shared_expert_size),
        dense_layers=frozenset(index for index in shape.dense_layers if index < layers))


def write_config(path: str, row: ComparisonRow) -> None:
    """The row's DeepSpeed JSON. Raises ConfigError where it cannot be written."""
    try:
        Path(path).write_text(json.dumps(row.candidate.config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}", found=error.strerror or str(error), expected="a file in a folder that "
                          "can be written to") from None
