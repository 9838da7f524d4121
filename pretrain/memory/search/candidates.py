"""Candidate layouts of a search: generated from axes, or read from DeepSpeed JSONs."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.layout import Layout
from pretrain.config.lenient import lenient_layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.hardware import Cluster
from pretrain.memory.search.axes import Axes, Combination, combinations_of, default_axes
from pretrain.memory.search.constraints import impossible_reason
from pretrain.memory.search.ds_config import make_config, with_batch_sizes
from pretrain.memory.step_time.predicted_layer_times import with_predicted_times

SAMPLES_PER_RANK = 8  # samples of a step per rank, if no batch size is given


@dataclass(frozen=True)
class Candidate:
    """One layout, with the DeepSpeed JSON that describes it."""

    name: str
    config: dict[str, Any] = field(compare=False)
    layout: Layout
    path: str = ""  # path of the user's JSON; "": the JSON was generated


@dataclass(frozen=True)
class CandidateSet:
    """The possible layouts, and the number of impossible combinations for each reason."""

    candidates: list[Candidate]
    impossible: dict[str, int]


def generate_candidates(axes: Axes, cluster: Cluster, shape: ModelShape | None, *,
                        device_kind: str = "cuda") -> CandidateSet:
    """Generate a candidate for every possible combination and every micro-batch size that the global batch allows.

    Raises:
        ConfigError: no combination is possible. The message has the first reason.
    """
    axes = default_axes(axes, cluster, shape)
    candidates: list[Candidate] = []
    impossible: dict[str, int] = {}
    for choice in combinations_of(axes):
        reason = impossible_reason(choice, cluster, shape)
        found = [] if reason else list(_candidates_of(choice, axes, cluster, shape, device_kind))
        candidates += found
        if not found:
            reason = reason or _indivisible_batch(choice, axes, cluster)
            impossible[reason] = impossible.get(reason, 0) + 1
    if not candidates:
        raise ConfigError("layouts", problem=f"no requested layout is possible ({next(iter(impossible))})",
                          remedy="allow other values in the flags")
    return CandidateSet(candidates, impossible)


def _candidates_of(choice: Combination, axes: Axes, cluster: Cluster, shape: ModelShape | None,
                   device_kind: str) -> Iterator[Candidate]:
    """Yield a candidate for each micro-batch size. All other fields are the same, so only the first JSON is parsed."""
    base: Layout | None = None
    for micro, steps in _batch_sizes(choice, axes, cluster):
        config = make_config(choice, micro_batch_size=micro, accumulation_steps=steps, cluster=cluster, shape=shape)
        if base is None:
            base = lenient_layout(config, world_size=cluster.world_size, seq_length=choice.seq_length,
                                  hidden_size=shape.hidden_size if shape else None, device_kind=device_kind,
                                  name=_name(choice, axes))
            part = choice.recompute if choice.recompute != "offload" else "none"  # the JSON has the offload
            base = replace(base, recompute=part)
        layout = replace(base, micro_batch_size=micro, gradient_accumulation_steps=steps)
        yield Candidate(base.name, config, layout)


def _batch_sizes(choice: Combination, axes: Axes, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch size, accumulation steps) whose product fills each rank's part of the global batch."""
    if axes.gradient_accumulation_steps is not None and axes.global_batch_size is None:
        for micro in axes.micro_batch_sizes or (1, 2, 4, 8):
            yield micro, axes.gradient_accumulation_steps
        return
    samples, remainder = divmod(_global_batch_size(axes, cluster), cluster.world_size // choice.model_parallel_size)
    if remainder:
        return
    for micro in axes.micro_batch_sizes or [2**power for power in range(int(math.log2(samples)) + 1)]:
        steps, remainder = divmod(samples, micro)
        if not remainder and steps and axes.gradient_accumulation_steps in (None, steps):
            yield micro, steps


def _global_batch_size(axes: Axes, cluster: Cluster) -> int:
    return axes.global_batch_size or SAMPLES_PER_RANK * cluster.world_size


def _indivisible_batch(choice: Combination, axes: Axes, cluster: Cluster) -> str:
    """Return the reason for a combination without any valid micro-batch size."""
    ranks = cluster.world_size // choice.model_parallel_size
    return f"a global batch of {_global_batch_size(axes, cluster)} samples does not divide into micro-batches on " \
           f"{ranks} data-parallel ranks"


def _name(choice: Combination, axes: Axes) -> str:
    """Name a combination like the files in ds_configs/. Values that all combinations share are left out."""
    parts = [f"pipeline{choice.pipeline_stages}"] if choice.pipeline_stages > 1 else []
    parts.append(f"zero{choice.zero_stage}")
    if choice.offload != "none":
        parts.append(f"offload_{choice.offload}")
    for prefix, size in (("tp", choice.tensor_parallel_size), ("sp", choice.sequence_parallel_size),
                         ("ep", choice.expert_parallel_size)):
        if size > 1:
            parts.append(f"{prefix}{size}")
    if len(axes.precisions) > 1:
        parts.append(choice.precision)
    if choice.grad_accum_dtype:
        parts.append(f"{choice.grad_accum_dtype}_accumulation")
    interval = choice.activation_checkpoint_interval
    if interval:
        parts.append(f"checkpoint{interval if interval > 1 else ''}")
    if choice.recompute != "none":
        parts.append("cpu" if choice.recompute == "offload" else f"recompute_{choice.recompute}")
    if len(axes.seq_lengths) > 1:
        parts.append(f"seq{choice.seq_length}")
    return "_".join(parts)


def read_candidates(paths: list[str], cluster: Cluster, shape: ModelShape | None, *, seq_length: int,
                    micro_batch_size: int | None = None, gradient_accumulation_steps: int | None = None,
                    device_kind: str = "cuda") -> CandidateSet:
    """Read the layouts of DeepSpeed JSONs.

    Raises:
        ConfigError: a file is not a valid JSON, or no file describes a possible layout.
    """
    candidates, impossible = list[Candidate](), dict[str, int]()
    for path in paths:
        file = read_ds_config(path, flag="--configs")
        try:
            layout = lenient_layout(
                file.values, world_size=cluster.world_size, seq_length=seq_length,
                hidden_size=shape.hidden_size if shape else None, micro_batch_size=micro_batch_size,
                gradient_accumulation_steps=gradient_accumulation_steps, device_kind=device_kind, name=Path(path).stem,
                num_parameters=shape.num_parameters() if shape else None)
        except ConfigError as error:
            impossible[f"{path}: {error}"] = 1
            continue
        layout = with_predicted_times(layout, shape, cluster)
        candidates.append(Candidate(layout.name, with_batch_sizes(file.values, layout), layout, path))
    if not candidates:
        reason = next(iter(impossible), "no file given")
        raise ConfigError("--configs", problem=f"no file describes a possible layout ({reason.removesuffix('.')})")
    return CandidateSet(candidates, impossible)


def group_micro_batches(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Group the candidates that differ only in their micro-batch size; the names contain all other values."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.path, candidate.name, candidate.layout.seq_length), []).append(candidate)
    return list(groups.values())
