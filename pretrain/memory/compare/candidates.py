"""Candidate layouts of a search, each with its DeepSpeed JSON: generated from axes, or read from files."""

import copy
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.config.auto_values import DEFAULT_LEARNING_RATE, fill_zero_sizes
from pretrain.config.ds_json.read import DsFile, get_value, read_ds_config
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout import Layout, parse_layout
from pretrain.config.plan import Plan
from pretrain.config.resolve import resolve_ds_config
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.memory.compare.combinations import (
    OFFLOADS,
    Axes,
    Combination,
    combinations_of,
    default_axes,
    impossible_reason,
)
from pretrain.memory.hardware import Cluster
from pretrain.memory.step_time.kernel_time import with_predicted_times
from pretrain.model.description import ModelConfig

_REDUCE_BUCKET = 2**24  # elements; 32 MiB in bf16
_NVME_BUFFER = 100_000_000  # elements, DeepSpeed's default of offload_param.buffer_size
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


def generate_candidates(axes: Axes, cluster: Cluster, shape: ModelConfig | None, *,
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


def _candidates_of(choice: Combination, axes: Axes, cluster: Cluster, shape: ModelConfig | None,
                   device_kind: str) -> Iterator[Candidate]:
    """Yield a candidate for each micro-batch size. All other fields are the same, so only the first JSON is parsed."""
    base: Layout | None = None
    for micro, steps in _batch_sizes(choice, axes, cluster):
        config = make_config(choice, micro_batch_size=micro, accumulation_steps=steps, cluster=cluster, shape=shape)
        if base is None:
            filled = copy.deepcopy(config)
            fill_zero_sizes(filled["zero_optimization"], shape.hidden_size if shape else 0)
            base = parse_layout(filled, world_size=cluster.world_size, seq_length=choice.seq_length,
                                device_kind=device_kind, name=_name(choice, axes))
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


def read_candidates(paths: list[str], cluster: Cluster, model: ModelConfig, *, seq_length: int,
                    micro_batch_size: int | None = None, gradient_accumulation_steps: int | None = None,
                    device_kind: str = "cuda") -> CandidateSet:
    """Read the layouts of DeepSpeed JSONs. The batch sizes are used where a JSON has none.

    Raises:
        ConfigError: a file is not a valid JSON, or no file describes a possible layout.
    """
    candidates, impossible = list[Candidate](), dict[str, int]()
    sizes = {"micro_batch_size": ("train_micro_batch_size_per_gpu", micro_batch_size),
             "gradient_accumulation_steps": ("gradient_accumulation_steps", gradient_accumulation_steps)}
    for path in paths:
        file = read_ds_config(path, flag="--configs")
        missing = {flag: size for flag, (key, size) in sizes.items() if file.get(key, "auto") == "auto"}
        try:
            layout = resolve_json(file, cluster, model, device_kind, seq_length=seq_length, **missing).layout
        except ConfigError as error:
            impossible[str(error).removesuffix(".")] = 1
            continue
        layout = with_predicted_times(replace(layout, name=Path(path).stem), model, cluster)
        candidates.append(Candidate(layout.name, with_batch_sizes(file.values, layout), layout, path))
    if not candidates:
        reason = next(iter(impossible), "no file given")
        raise ConfigError("--configs", problem=f"no file describes a possible layout ({reason})")
    return CandidateSet(candidates, impossible)


def resolve_json(file: DsFile, cluster: Cluster, model: ModelConfig, device_kind: str, **flags: Any) -> Plan:
    """Resolve a DeepSpeed JSON as train.py does with these flags. Raises ConfigError.

    Folders for NVMe offload need not exist on this machine.
    """
    values = copy.deepcopy(file.values)
    for name in ("offload_optimizer", "offload_param"):
        block = get_value(values, f"zero_optimization.{name}")
        if isinstance(block, dict) and "nvme" in str(block.get("device")).lower():
            block["nvme_path"] = tempfile.gettempdir()
    gpu = cluster.gpu
    args = RunArguments(save=tempfile.gettempdir(), train_steps=1,
                        learning_rate=None if "optimizer" in values else DEFAULT_LEARNING_RATE, **flags)
    device = Device(device_kind, fp16=gpu.kind == "cuda", bf16=gpu.knows_bf16, memory_bytes=gpu.memory_bytes)
    return resolve_ds_config(replace(file, values=values), args, model=model, world_size=cluster.world_size,
                             device=device)


def group_micro_batches(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Group the candidates that differ only in their micro-batch size; the names contain all other values."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.path, candidate.name, candidate.layout.seq_length), []).append(candidate)
    return list(groups.values())


def make_config(choice: Combination, *, micro_batch_size: int, accumulation_steps: int, cluster: Cluster,
                shape: ModelConfig | None) -> dict[str, Any]:
    """Make the DeepSpeed JSON of a combination. Values that train.py fills from flags and model remain "auto"."""
    data_parallel_size = cluster.world_size // choice.model_parallel_size
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size, "gradient_accumulation_steps": accumulation_steps,
        "train_batch_size": micro_batch_size * accumulation_steps * data_parallel_size, "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}
    if choice.precision != "fp32":
        config[choice.precision] = {"enabled": True}
    if choice.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": choice.grad_accum_dtype}
    zero = _zero_block(choice, cluster, shape)
    if shape is None:  # "auto" sizes are computed from the hidden size, which is unknown here
        zero = {name: value for name, value in zero.items() if value != "auto"}
    config["zero_optimization"] = zero
    if "nvme" in OFFLOADS[choice.offload]:
        config["aio"] = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True}
    if choice.pipeline_stages > 1:
        config["pipeline"] = {"stages": choice.pipeline_stages, "partition_method": "flops"}
    if choice.activation_checkpoint_interval:
        pipeline = config.setdefault("pipeline", {})
        pipeline["activation_checkpoint_interval"] = choice.activation_checkpoint_interval
    if choice.recompute == "offload":
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
    if choice.tensor_parallel_size > 1:
        config["tensor_parallel"] = {"autotp_size": choice.tensor_parallel_size}
    if choice.sequence_parallel_size > 1:
        config["sequence_parallel_size"] = choice.sequence_parallel_size
    if choice.expert_parallel_size > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": choice.expert_parallel_size}
    return config


def _zero_block(choice: Combination, cluster: Cluster, shape: ModelConfig | None) -> dict[str, Any]:
    """Make the zero_optimization block."""
    zero: dict[str, Any] = {"stage": choice.zero_stage}
    if choice.zero_stage:
        zero["reduce_bucket_size"] = _reduce_bucket_size(choice, shape)
    if choice.zero_stage >= 2:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if choice.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    optimizer, param = OFFLOADS[choice.offload]
    for block, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device != "none":
            zero[block] = {"device": device, "pin_memory": True}
        if device == "nvme":
            zero[block]["nvme_path"] = "auto"
    if param == "nvme":
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": _nvme_buffer_size(cluster, shape)}
    return zero


def _reduce_bucket_size(choice: Combination, shape: ModelConfig | None) -> int | str:
    """Return the elements of a bucket of gradients.

    "auto" is the square of the hidden size. Below stage 3 that is small for small models: their gradients would need
    hundreds of collectives, each with its latency.
    """
    if shape is None or choice.zero_stage == 3 or shape.hidden_size**2 >= _REDUCE_BUCKET:
        return "auto"
    return min(_REDUCE_BUCKET, shape.num_parameters())


def _nvme_buffer_size(cluster: Cluster, shape: ModelConfig | None) -> int:
    """Return the elements of an NVMe buffer, which must hold one rank's part of the largest parameter."""
    if shape is None:
        return _NVME_BUFFER
    largest = max(parameter.size for layer in shape.layers() for parameter in layer.parameters)
    return max(_NVME_BUFFER, -(-largest // cluster.world_size))


def with_batch_sizes(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return a copy of a JSON in which missing and "auto" batch sizes are the layout's."""
    sizes = {"train_micro_batch_size_per_gpu": layout.micro_batch_size,
             "gradient_accumulation_steps": layout.gradient_accumulation_steps,
             "train_batch_size": layout.global_batch_size}
    return {**config, **{name: size for name, size in sizes.items() if config.get(name) in (None, "auto")}}


def write_config(path: str, config: dict[str, Any]) -> None:
    """Write a DeepSpeed JSON. Raises ConfigError if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path}", problem=f"the file cannot be written ({error.strerror or error})",
                          remedy="choose a file in a writable folder") from None
