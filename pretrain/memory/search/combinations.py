"""Which layouts are compared: a DeepSpeed JSON for each, and why some combinations are none."""

import itertools
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

OFFLOADS = {"none": ("none", "none"), "optimizer_cpu": ("cpu", "none"), "all_cpu": ("cpu", "cpu"),
            "optimizer_nvme": ("nvme", "none"), "all_nvme": ("nvme", "nvme")}
SAMPLES_PER_RANK = 8  # of a step, where no batch size is given
_NVME_BUFFER = 100_000_000  # elements, DeepSpeed's default


@dataclass(frozen=True)
class Axes:
    """What is varied; every combination of it is looked at. Empty: the default of `default_axes`."""

    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    offloads: tuple[str, ...] = tuple(OFFLOADS)
    pipeline_stages: tuple[int, ...] = ()
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    sequence_parallel_sizes: tuple[int, ...] = (1,)
    expert_parallel_sizes: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ()
    grad_accum_dtypes: tuple[str, ...] = ("",)  # "": as the precision
    activation_checkpoint_intervals: tuple[int, ...] = (0, 1)
    micro_batch_sizes: tuple[int, ...] = ()  # powers of two
    seq_lengths: tuple[int, ...] = (1024,)
    global_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One layout, as a DeepSpeed JSON and as what the estimate reads."""

    name: str
    config: dict[str, Any] = field(compare=False)
    layout: Layout
    path: str = ""  # of the JSON that somebody wrote; "": made here


@dataclass(frozen=True)
class Combinations:
    """The layouts, and how many combinations were none, by reason."""

    candidates: list[Candidate]
    impossible: dict[str, int]


def default_axes(axes: Axes, cluster: Cluster, shape: ModelShape | None) -> Axes:
    """With what was left open filled in: pipelines of 2 to 64 stages where the ranks allow them, the device's
    precision. Without a shape only states are known, so that neither recomputation nor micro-batch matters.
    """
    stages = tuple(size for size in (1, 2, 4, 8, 16, 32, 64)
                   if cluster.world_size % size == 0 and (shape is None or size <= shape.num_layers))
    states_only = {} if shape is not None else {
        "activation_checkpoint_intervals": (0,), "micro_batch_sizes": (1,), "gradient_accumulation_steps": 1}
    return replace(axes, pipeline_stages=axes.pipeline_stages or (stages if shape is not None else (1,)),
                   precisions=axes.precisions or ("bf16" if cluster.gpu.knows_bf16 else "fp16",),
                   **states_only)  # type: ignore[arg-type]


def combine(axes: Axes, cluster: Cluster, shape: ModelShape | None, *, device_kind: str = "cuda") -> Combinations:
    """Every combination that DeepSpeed has, each with every micro-batch that closes.

    Raises:
        ConfigError: none of them is possible, with the first reason.
    """
    axes = default_axes(axes, cluster, shape)
    candidates: list[Candidate] = []
    impossible: dict[str, int] = {}
    for choice in _choices(axes):
        why = impossibility(choice, cluster, shape)
        found = [] if why else list(_with_batches(choice, axes, cluster, shape, device_kind))
        candidates += found
        if not found:
            why = why or _batch_reason(choice, axes, cluster)
            impossible[why] = impossible.get(why, 0) + 1
    if not candidates:
        raise ConfigError("the layouts asked for", found=f"none that is possible: {next(iter(impossible))}",
                          expected="at least one", remedy="widen a flag")
    return Combinations(candidates, impossible)


@dataclass(frozen=True)
class _Choice:
    """One combination, before its batch sizes."""

    zero_stage: int
    offload: str
    pipeline_stages: int
    tensor: int
    sequence: int
    expert: int
    precision: str
    grad_accum_dtype: str
    interval: int
    seq_length: int

    @property
    def shared(self) -> int:
        """Ranks that see the same samples."""
        return self.pipeline_stages * self.tensor * self.sequence


def _choices(axes: Axes) -> Iterator[_Choice]:
    for values in itertools.product(
            axes.zero_stages, axes.offloads, axes.pipeline_stages, axes.tensor_parallel_sizes,
            axes.sequence_parallel_sizes, axes.expert_parallel_sizes, axes.precisions, axes.grad_accum_dtypes,
            axes.activation_checkpoint_intervals, axes.seq_lengths):
        yield _Choice(*values)


def impossibility(choice: _Choice, cluster: Cluster, shape: ModelShape | None) -> str:
    """Why DeepSpeed, the device or the model does not do it; "" where they do."""
    stage, (optimizer, param), sizes = choice.zero_stage, OFFLOADS[choice.offload], choice.shared
    rules = (
        (choice.pipeline_stages > 1 and stage >= 2, "pipelines work with ZeRO stage 0 or 1"),
        (optimizer != "none" and stage == 0, "an offloaded optimizer needs ZeRO stage 1 or more"),
        (param != "none" and stage != 3, "offloaded parameters need ZeRO stage 3"),
        (optimizer == "nvme" and stage != 3, "NVMe needs ZeRO stage 3"),
        (choice.pipeline_stages > 1 and choice.sequence > 1, "DeepSpeed ignores Ulysses under a pipeline"),
        (choice.precision == "bf16" and not cluster.gpu.knows_bf16, f"{cluster.gpu.name} has no bf16"),
        (bool(choice.grad_accum_dtype) and choice.grad_accum_dtype != choice.precision and stage == 0,
         "another accumulation type needs ZeRO stage 1 or more"),
        (choice.grad_accum_dtype not in ("", "fp32", choice.precision),
         "gradients are accumulated in the precision or in fp32"),
        (cluster.world_size % sizes != 0, f"{sizes} ranks that share a sample do not divide {cluster.world_size}"),
    )
    for broken, why in rules:
        if broken:
            return why
    if (cluster.world_size // sizes * choice.sequence) % choice.expert:
        return f"{choice.expert} expert-parallel ranks do not divide the data-parallel ones"
    return _model_impossibility(choice, shape) if shape is not None else ""


def _model_impossibility(choice: _Choice, shape: ModelShape) -> str:
    rules = (
        (choice.pipeline_stages > shape.num_layers, f"more pipeline stages than {shape.num_layers} layers"),
        (shape.num_heads % (choice.tensor * choice.sequence) != 0,
         f"{choice.tensor * choice.sequence} ranks do not divide {shape.num_heads} heads"),
        (choice.seq_length % choice.sequence != 0,
         f"{choice.sequence} ranks do not divide a sequence of {choice.seq_length}"),
        (choice.expert > 1 and shape.num_experts == 0, "the model has no experts"),
        (shape.num_experts % choice.expert != 0,
         f"{choice.expert} ranks do not divide {shape.num_experts} experts"),
        (shape.position == "learned" and choice.seq_length > shape.position_rows,
         f"the model has {shape.position_rows} positions"),
    )
    return next((why for broken, why in rules if broken), "")


def _batches(choice: _Choice, axes: Axes, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(micro-batch, accumulation steps) that close exactly with the global batch."""
    ranks = cluster.world_size // choice.shared
    if axes.gradient_accumulation_steps is not None and axes.global_batch_size is None:
        for micro in axes.micro_batch_sizes or (1, 2, 4, 8):
            yield micro, axes.gradient_accumulation_steps
        return
    total = axes.global_batch_size or SAMPLES_PER_RANK * cluster.world_size
    mine, rest = divmod(total, ranks)
    if rest:
        return
    for micro in axes.micro_batch_sizes or [2**power for power in range(int(math.log2(mine)) + 1)]:
        steps, rest = divmod(mine, micro)
        if not rest and steps and axes.gradient_accumulation_steps in (None, steps):
            yield micro, steps


def _batch_reason(choice: _Choice, axes: Axes, cluster: Cluster) -> str:
    total, ranks = axes.global_batch_size or SAMPLES_PER_RANK * cluster.world_size, cluster.world_size // choice.shared
    return f"a global batch of {total} samples does not divide into micro-batches on {ranks} data-parallel ranks"


def _with_batches(choice: _Choice, axes: Axes, cluster: Cluster, shape: ModelShape | None,
                  device_kind: str) -> Iterator[Candidate]:
    base: Layout | None = None
    for micro, steps in _batches(choice, axes, cluster):
        config = make_config(choice, micro, steps, cluster, shape)
        if base is None:
            base = lenient_layout(config, world_size=cluster.world_size, seq_length=choice.seq_length,
                                    hidden_size=shape.hidden_size if shape else None, device_kind=device_kind,
                                    name=_name(choice, axes))
            base = replace(base, expert_parallel_size=choice.expert)
        layout = replace(base, micro_batch_size=micro, gradient_accumulation_steps=steps)
        yield Candidate(base.name, config, layout)


def _name(choice: _Choice, axes: Axes) -> str:
    """Short, and as the files of ds_configs/ are called; what does not vary is left out."""
    parts = [f"pipeline{choice.pipeline_stages}"] if choice.pipeline_stages > 1 else []
    parts.append(f"zero{choice.zero_stage}")
    if choice.offload != "none":
        parts.append(f"offload_{choice.offload}")
    for word, size in (("tp", choice.tensor), ("sp", choice.sequence), ("ep", choice.expert)):
        parts += [f"{word}{size}"] * (size > 1)
    parts += [choice.precision] * (len(axes.precisions) > 1)
    parts += [f"{choice.grad_accum_dtype}_accumulation"] * bool(choice.grad_accum_dtype)
    parts += [f"checkpoint{choice.interval if choice.interval > 1 else ''}"] * (choice.interval > 0)
    parts += [f"seq{choice.seq_length}"] * (len(axes.seq_lengths) > 1)
    return "_".join(parts)


def make_config(choice: _Choice, micro: int, steps: int, cluster: Cluster, shape: ModelShape | None) -> dict[str, Any]:
    """The DeepSpeed JSON of a combination; rates and sizes that the run's flags and its model fill stay "auto"."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * (cluster.world_size // choice.shared), "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}
    if choice.precision != "fp32":
        config[choice.precision] = {"enabled": True}
    if choice.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": choice.grad_accum_dtype}
    config["zero_optimization"] = _zero_block(choice, cluster, shape)
    if shape is None:  # from whose width "auto" sizes would follow
        config["zero_optimization"] = {name: value for name, value in config["zero_optimization"].items()
                                       if value != "auto"}
    if "nvme" in OFFLOADS[choice.offload]:
        config["aio"] = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True}
    if choice.pipeline_stages > 1:
        config["pipeline"] = {"stages": choice.pipeline_stages, "partition_method": "flops"}
    if choice.interval:
        config.setdefault("pipeline", {})["activation_checkpoint_interval"] = choice.interval
    if choice.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": choice.tensor}
    if choice.sequence > 1:
        config["sequence_parallel_size"] = choice.sequence
    return config


def _zero_block(choice: _Choice, cluster: Cluster, shape: ModelShape | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": choice.zero_stage}
    if choice.zero_stage:
        zero["reduce_bucket_size"] = "auto"
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
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": _nvme_buffer(cluster, shape)}
    return zero


def _nvme_buffer(cluster: Cluster, shape: ModelShape | None) -> int:
    """Elements that a rank's part of the largest matrix fits in."""
    if shape is None:
        return _NVME_BUFFER
    largest = max(tensor.size for layer in shape.layers() for tensor in layer.tensors)
    return max(_NVME_BUFFER, -(-largest // cluster.world_size))


def read_candidates(paths: list[str], cluster: Cluster, shape: ModelShape | None, *, seq_length: int,
                    micro_batch_size: int | None = None, gradient_accumulation_steps: int | None = None,
                    device_kind: str = "cuda") -> Combinations:
    """The layouts of JSONs, whoever wrote them. Raises ConfigError for a file that is no JSON, or if all fail."""
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
        candidates.append(Candidate(layout.name, with_batch(file.values, layout), layout, path))
    if not candidates:
        raise ConfigError("--configs", found=f"no layout that is possible: {next(iter(impossible), 'no file')}",
                          expected="at least one")
    return Combinations(candidates, impossible)


def group_micro_batches(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Those together that differ in the micro-batch only: names say all the rest."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.path, candidate.name, candidate.layout.seq_length), []).append(candidate)
    return list(groups.values())


def with_batch(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """A copy with the layout's batch sizes in place of "auto" and of what is not there."""
    sizes = {"train_micro_batch_size_per_gpu": layout.micro_batch_size,
             "gradient_accumulation_steps": layout.gradient_accumulation_steps,
             "train_batch_size": layout.global_batch_size}
    return {**config, **{name: size for name, size in sizes.items() if config.get(name) in (None, "auto")}}
