"""Candidate layouts of a search, generated from axes, each with its DeepSpeed JSON."""

import copy
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pretrain.config.auto_values import DEFAULT_LEARNING_RATE
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.layout import Layout, parse_layout
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.run_rules import check_rules
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError
from pretrain.memory.compare.combinations import OFFLOADS, Axes, combinations_of, default_axes, impossible_reason
from pretrain.memory.hardware import Cluster
from pretrain.model.description import ModelConfig

_REDUCE_BUCKET = 2**24  # elements; 32 MiB in bf16
_NVME_BUFFER = 100_000_000  # elements, DeepSpeed's default of offload_param.buffer_size
SAMPLES_PER_RANK = 8  # samples of a step per rank, if no batch size is given
ANY_LENGTH = 10**12  # steps of a run whose length is unknown: longer than each warm-up


@dataclass(frozen=True)
class Candidate:
    """One layout, with the DeepSpeed JSON that describes it."""

    config: dict[str, Any]
    layout: Layout
    rejection: str = ""  # why train.py rejects the JSON; "": it accepts the JSON
    path: str = ""  # path of the user's JSON; "": the JSON was generated

    @property
    def name(self) -> str:
        return self.layout.name


@dataclass(frozen=True)
class CandidateSet:
    """The possible layouts, and the number of impossible combinations for each reason."""

    candidates: list[Candidate]
    impossible: dict[str, int]


def generate_candidates(axes: Axes, cluster: Cluster, model: ModelConfig | None, *, device_kind: str = "cuda",
                        document_attention: bool = False) -> CandidateSet:
    """Generate a candidate for every possible combination and every micro-batch size that the global batch allows.

    Raises:
        ConfigError: no combination is possible. The message has the first reason.
    """
    axes = default_axes(axes, cluster, model)
    candidates: list[Candidate] = []
    impossible: dict[str, int] = {}
    for combination in combinations_of(axes, cluster.world_size):
        reason = impossible_reason(combination, cluster, model)
        found = [] if reason else list(_candidates_of(replace(
            combination, name=_name(combination, axes), device_kind=device_kind,
            document_attention=document_attention), axes, cluster, model))
        candidates += found
        if not found:
            reason = reason or _indivisible_batch(combination, axes, cluster)
            impossible[reason] = impossible.get(reason, 0) + 1
    if not candidates:
        raise ConfigError("layouts", problem=f"no requested layout is possible ({next(iter(impossible))})",
                          remedy="allow other values in the flags")
    return CandidateSet(candidates, impossible)


def _candidates_of(layout: Layout, axes: Axes, cluster: Cluster, model: ModelConfig | None) -> Iterator[Candidate]:
    """Yield a candidate for each micro-batch size. All other fields are the same, so only the first JSON is parsed."""
    first: Candidate | None = None
    for micro, steps in _batch_sizes(layout, axes, cluster):
        sizes = {"micro_batch_size": micro, "gradient_accumulation_steps": steps}
        first = first or resolve_candidate(
            DsFile(layout.name, make_config(layout.with_batch(**sizes), cluster, model)), layout, cluster, model)
        own = first.layout.with_batch(**sizes)
        yield replace(first, config={**first.config, **batch_keys(own)}, layout=own)


def resolve_candidate(file: DsFile, given: Layout, cluster: Cluster, model: ModelConfig | None, *,
                      path: str = "") -> Candidate:
    """Return the candidate that a DeepSpeed JSON describes.

    Args:
        given: has the fields that a JSON does not set: name, device_kind, and the fields of train.py's flags.
        model: None if the model's sizes are unknown. Then train.py's rules are not checked.

    Raises:
        ConfigError: train.py cannot read a layout from the JSON.
    """
    of_flags = {name: getattr(given, name) for name in ("name", "device_kind", "document_attention", "recompute")}
    if model is None:
        return Candidate(file.values, parse_layout(file.values, world_size=cluster.world_size,
                                                   seq_length=given.seq_length, **of_flags), path=path)
    gpu = cluster.gpu
    device = Device(gpu.kind, fp16=gpu.kind == "cuda", bf16=gpu.knows_bf16, memory_bytes=gpu.memory_bytes)
    args = RunArguments(save=tempfile.gettempdir(), train_steps=ANY_LENGTH, seq_length=given.seq_length,
                        document_attention=given.document_attention,
                        recompute=given.recompute if given.recompute != "none" else None,
                        learning_rate=None if "optimizer" in file.values else DEFAULT_LEARNING_RATE)
    resolved = resolve_ds_config(replace(file, values=_with_nvme_paths(file.values)), args, model=model,
                                 world_size=cluster.world_size, device=device)
    rejection = ""
    if given.seq_length > model.longest_sequence():
        rejection = f"--seq_length {given.seq_length} is more than the model's {model.max_positions} positions"
    else:
        try:
            check_rules(resolved, this_machine=False)
        except ConfigError as error:
            rejection = str(error).removeprefix(f"{file.path}: ")
    return Candidate(file.values, replace(resolved.layout, **of_flags), rejection, path)


def _with_nvme_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON whose NVMe paths exist on this machine, which need not be the one that trains."""
    config = copy.deepcopy(config)
    for name in ("offload_optimizer", "offload_param"):
        block = get_value(config, f"zero_optimization.{name}")
        if isinstance(block, dict) and str(block.get("device")).lower() == "nvme":
            block["nvme_path"] = tempfile.gettempdir()
    return config


def _batch_sizes(layout: Layout, axes: Axes, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch size, accumulation steps) whose product fills each rank's part of the global batch."""
    if axes.gradient_accumulation_steps is not None and axes.global_batch_size is None:
        for micro in axes.micro_batch_sizes or (1, 2, 4, 8):
            yield micro, axes.gradient_accumulation_steps
        return
    samples, remainder = divmod(_global_batch_size(axes, cluster), layout.data_parallel_size)
    if remainder:
        return
    for micro in axes.micro_batch_sizes or [2**power for power in range(int(math.log2(samples)) + 1)]:
        steps, remainder = divmod(samples, micro)
        if not remainder and steps and axes.gradient_accumulation_steps in (None, steps):
            yield micro, steps


def _global_batch_size(axes: Axes, cluster: Cluster) -> int:
    return axes.global_batch_size or SAMPLES_PER_RANK * cluster.world_size


def _indivisible_batch(layout: Layout, axes: Axes, cluster: Cluster) -> str:
    """Return the reason for a combination without any valid micro-batch size."""
    return f"a global batch of {_global_batch_size(axes, cluster)} samples does not divide into micro-batches on " \
           f"{layout.data_parallel_size} data-parallel ranks"


def _name(layout: Layout, axes: Axes) -> str:
    """Name a layout like the files in ds_configs/. Values that all combinations share are left out."""
    parts = [f"pipeline{layout.pipeline_stages}"] if layout.pipeline_stages > 1 else []
    parts.append(f"zero{layout.zero_stage}")
    offload = next(name for name, states in OFFLOADS.items()
                   if states == (layout.offload_optimizer, layout.offload_param))
    if offload != "none":
        parts.append(f"offload_{offload}")
    for prefix, size in (("tp", layout.tensor_parallel_size), ("sp", layout.sequence_parallel_size),
                         ("ep", layout.expert_parallel_size)):
        if size > 1:
            parts.append(f"{prefix}{size}")
    if len(axes.precisions) > 1:
        parts.append(layout.precision)
    if layout.grad_accum_dtype:
        parts.append(f"{layout.grad_accum_dtype}_accumulation")
    interval = layout.activation_checkpoint_interval
    if interval:
        parts.append(f"checkpoint{interval if interval > 1 else ''}")
    if layout.offload_activations:
        parts.append("cpu")
    elif layout.recompute != "none":
        parts.append(f"recompute_{layout.recompute}")
    if len(axes.seq_lengths) > 1:
        parts.append(f"seq{layout.seq_length}")
    return "_".join(parts)


def group_micro_batches(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Group the candidates that differ only in their micro-batch size; the names contain all other values."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.path, candidate.name, candidate.layout.seq_length), []).append(candidate)
    return list(groups.values())


def make_config(layout: Layout, cluster: Cluster, model: ModelConfig | None) -> dict[str, Any]:
    """Make the DeepSpeed JSON of a layout. Values that train.py fills from flags and model remain "auto"."""
    config: dict[str, Any] = {
        **batch_keys(layout), "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}
    if layout.precision != "fp32":
        config[layout.precision] = {"enabled": True}
    if layout.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": layout.grad_accum_dtype}
    zero = _zero_block(layout, cluster, model)
    if model is None:  # "auto" sizes are computed from the hidden size, which is unknown here
        zero = {name: value for name, value in zero.items() if value != "auto"}
    config["zero_optimization"] = zero
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        config["aio"] = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True}
    if layout.pipeline_stages > 1:
        config["pipeline"] = {"stages": layout.pipeline_stages, "partition_method": "flops"}
    if layout.activation_checkpoint_interval:
        pipeline = config.setdefault("pipeline", {})
        pipeline["activation_checkpoint_interval"] = layout.activation_checkpoint_interval
    if layout.offload_activations:
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
    if layout.tensor_parallel_size > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor_parallel_size}
    if layout.sequence_parallel_size > 1:
        config["sequence_parallel_size"] = layout.sequence_parallel_size
    if layout.expert_parallel_size > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": layout.expert_parallel_size}
    return config


def batch_keys(layout: Layout) -> dict[str, int]:
    """Return the keys of the batch in a DeepSpeed JSON."""
    return {"train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "train_batch_size": layout.global_batch_size}


def _zero_block(layout: Layout, cluster: Cluster, model: ModelConfig | None) -> dict[str, Any]:
    """Make the zero_optimization block."""
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage:
        zero["reduce_bucket_size"] = _reduce_bucket_size(layout, model)
    if layout.zero_stage >= 2:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if layout.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    for block, device in (("offload_optimizer", layout.offload_optimizer), ("offload_param", layout.offload_param)):
        if device != "none":
            zero[block] = {"device": device, "pin_memory": True}
        if device == "nvme":
            zero[block]["nvme_path"] = "auto"
    if layout.offload_param == "nvme":
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": _nvme_buffer_size(cluster, model)}
    return zero


def _reduce_bucket_size(layout: Layout, model: ModelConfig | None) -> int | str:
    """Return the elements of a bucket of gradients.

    "auto" is the square of the hidden size. Below stage 3 that is small for small models: their gradients would need
    hundreds of collectives, each with its latency.
    """
    if model is None or layout.zero_stage == 3 or model.hidden_size**2 >= _REDUCE_BUCKET:
        return "auto"
    return min(_REDUCE_BUCKET, model.num_parameters())


def _nvme_buffer_size(cluster: Cluster, model: ModelConfig | None) -> int:
    """Return the elements of an NVMe buffer, which must hold one rank's part of the largest parameter."""
    if model is None:
        return _NVME_BUFFER
    largest = max(parameter.size for layer in model.layers() for parameter in layer.parameters)
    return max(_NVME_BUFFER, -(-largest // cluster.world_size))
