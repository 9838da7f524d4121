"""Values that a search combines, the layouts that they give, and why such a layout is impossible."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pretrain.config.layout import Layout
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.hardware import Cluster
from pretrain.model.description import ModelConfig

# choice of --offload -> (Layout.offload_optimizer, Layout.offload_param)
OFFLOADS = {"none": ("none", "none"), "optimizer_cpu": ("cpu", "none"), "all_cpu": ("cpu", "cpu"),
            "optimizer_nvme": ("nvme", "none"), "all_nvme": ("nvme", "nvme")}
# Parts that --recompute of train.py recomputes, without an interval. "offload": with an interval, the inputs of the
# recomputed groups are in host memory.
RECOMPUTE_CHOICES = ("none", "attention", "mlp", "offload")
PARALLEL_SIZES = ("tensor_parallel_sizes", "sequence_parallel_sizes", "expert_parallel_sizes")


@dataclass(frozen=True)
class Axes:
    """Values to combine; the search tries every combination. `default_axes` fills the empty fields."""

    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    offloads: tuple[str, ...] = tuple(OFFLOADS)
    pipeline_stages: tuple[int, ...] = ()
    tensor_parallel_sizes: tuple[int, ...] = ()
    sequence_parallel_sizes: tuple[int, ...] = ()
    expert_parallel_sizes: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    grad_accum_dtypes: tuple[str, ...] = ("",)  # "": the same as the precision
    activation_checkpoint_intervals: tuple[int, ...] = (0, 1)
    recomputes: tuple[str, ...] = RECOMPUTE_CHOICES[:3]
    micro_batch_sizes: tuple[int, ...] = ()  # empty: powers of two
    seq_lengths: tuple[int, ...] = (1024,)
    global_batch_size: int | None = None  # samples of a step
    gradient_accumulation_steps: int | None = None
    proposed: frozenset[str] = frozenset()  # fields of parallel degrees that `default_axes` has filled


def default_axes(axes: Axes, cluster: Cluster, model: ModelConfig | None) -> Axes:
    """Fill the empty fields: pipelines of 1 to 64 stages that ranks and layers allow, and bf16 if the GPU has it.

    Other parallel degrees than 1 are proposed for models and sequences that need them.
    Without a model, only model states are estimated. Recomputation and micro-batches do not change states, so that a
    single value of each is enough.
    """
    axes = replace(axes, precisions=axes.precisions or ("bf16" if cluster.gpu.knows_bf16 else "fp16",))
    degrees = {} if model is None else proposed_degrees(axes, cluster, model)
    empty = [name for name in PARALLEL_SIZES if not getattr(axes, name)]
    filled: dict[str, Any] = {name: (1, *degrees.get(name, ())) for name in empty}
    axes = replace(axes, proposed=frozenset(empty), **filled)
    if model is None:
        return replace(axes, pipeline_stages=axes.pipeline_stages or (1,), activation_checkpoint_intervals=(0,),
                       recomputes=("none",), micro_batch_sizes=(1,), gradient_accumulation_steps=1)
    pipeline_stages = tuple(stages for stages in (1, 2, 4, 8, 16, 32, 64)
                            if cluster.world_size % stages == 0 and stages <= model.num_layers)
    return replace(axes, pipeline_stages=axes.pipeline_stages or pipeline_stages)


def proposed_degrees(axes: Axes, cluster: Cluster, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return degrees above 1 that are worth a comparison, by field of Axes: powers of two up to the GPUs of a node.

    - Tensor parallelism: if parameters and gradients do not fit a device, as with ZeRO-1 on a single pipeline stage and
      with the largest degree of expert parallelism.
    - Sequence parallelism: if one sample does not fit a device with ZeRO-3 and recomputation of every block.
    - Expert parallelism: if the model has experts. Sequence parallelism is then impossible.
    """
    sizes = tuple(2**power for power in range(1, 11)
                  if 2**power <= cluster.gpus_per_node and cluster.world_size % 2**power == 0)
    seq_lengths = [length for length in axes.seq_lengths
                   if model.position != "learned" or length <= model.max_positions]
    if not seq_lengths:
        return {}
    precision, seq_length = axes.precisions[0], max(seq_lengths)
    one_sample = Layout(world_size=cluster.world_size, zero_stage=3, precision=precision, seq_length=seq_length,
                        activation_checkpoint_interval=1)
    found: dict[str, tuple[int, ...]] = {}
    if model.num_experts:
        found["expert_parallel_sizes"] = tuple(size for size in sizes if model.num_experts % size == 0)
    expert = max(found.get("expert_parallel_sizes", ()), default=1)
    elements = sum(each.size / (expert if each.is_expert else 1) for _, each in model.named_parameters())
    if 2 * one_sample.element_bytes * elements > cluster.device_budget_bytes:
        found["tensor_parallel_sizes"] = tuple(size for size in sizes if model.num_heads % size == 0
                                               and model.num_kv_heads % size == 0 and seq_length % size == 0)
    if not model.num_experts and estimate_memory(model, one_sample).device_bytes > cluster.device_budget_bytes:
        found["sequence_parallel_sizes"] = tuple(size for size in sizes if model.num_heads % size == 0
                                                 and seq_length % size == 0)
    return found


def _is_usual(layout: Layout, axes: Axes) -> bool:
    """Return whether a layout is worth a comparison, if the search itself proposed its parallel degrees.

    Tensor parallelism is usual with ZeRO-1, sequence parallelism with ZeRO-3, expert parallelism with ZeRO-1 and 2;
    all of them without offload.
    """
    offloads = (layout.offload_optimizer, layout.offload_param) != OFFLOADS["none"]
    for name, size, zero_stages in (("tensor_parallel_sizes", layout.tensor_parallel_size, (1,)),
                                    ("sequence_parallel_sizes", layout.sequence_parallel_size, (3,)),
                                    ("expert_parallel_sizes", layout.expert_parallel_size, (1, 2))):
        if name in axes.proposed and size > 1 and (layout.zero_stage not in zero_stages or offloads):
            return False
    return True


def combinations_of(axes: Axes, world_size: int) -> Iterator[Layout]:
    """Yield a layout, without its batch sizes, for every combination of the axes' values.

    An interval and a recomputed part exclude each other. Buffer sizes have DeepSpeed's defaults.
    """
    columns: list[tuple[Any, ...]] = [
        axes.zero_stages, axes.offloads, axes.pipeline_stages, axes.tensor_parallel_sizes,
        axes.sequence_parallel_sizes, axes.expert_parallel_sizes, axes.precisions, axes.grad_accum_dtypes,
        axes.activation_checkpoint_intervals, axes.recomputes, axes.seq_lengths]
    for (zero_stage, offload, pipeline_stages, tensor, sequence, expert, precision, dtype, interval, recompute,
         length) in itertools.product(*columns):
        if recompute not in (("none", "offload") if interval else ("none", "attention", "mlp")):
            continue
        optimizer, param = OFFLOADS[offload]
        layout = Layout(
            world_size=world_size, zero_stage=zero_stage, offload_optimizer=optimizer, offload_param=param,
            pipeline_stages=pipeline_stages, tensor_parallel_size=tensor, sequence_parallel_size=sequence,
            expert_parallel_size=expert, precision=precision, grad_accum_dtype=dtype or None, seq_length=length,
            activation_checkpoint_interval=interval, offload_activations=recompute == "offload",
            recompute="none" if recompute == "offload" else recompute)
        if _is_usual(layout, axes):
            yield layout


def impossible_reason(layout: Layout, cluster: Cluster, model: ModelConfig | None) -> str:
    """Return why a layout is impossible, or "" if it is possible.

    Args:
        model: None if the model's sizes are unknown. Then only DeepSpeed's and the cluster's constraints are checked.
    """
    # the model first: its constraints remain whatever else the user changes
    checks = () if model is None else _model_constraints(layout, model)
    checks += (*_deepspeed_constraints(layout), *_cluster_constraints(layout, cluster))
    return next((reason for broken, reason in checks if broken), "")


def _ranks_per_replica(layout: Layout) -> int:
    return layout.pipeline_stages * layout.tensor_parallel_size * layout.sequence_parallel_size


def _deepspeed_constraints(layout: Layout) -> tuple[tuple[bool, str], ...]:
    """List the constraints of DeepSpeed 0.19.8 as (is it broken?, reason)."""
    optimizer, param = layout.offload_optimizer, layout.offload_param
    accumulates_in_other_dtype = layout.grad_accum_dtype not in (None, layout.precision)
    return (
        (layout.pipeline_stages > 1 and layout.zero_stage >= 2, "pipelines need ZeRO stage 0 or 1"),
        (optimizer != "none" and layout.zero_stage == 0, "optimizer offload needs ZeRO stage 1 or higher"),
        (param != "none" and layout.zero_stage != 3, "parameter offload needs ZeRO stage 3"),
        (optimizer == "nvme" and layout.zero_stage != 3, "NVMe offload needs ZeRO stage 3"),
        (layout.pipeline_stages > 1 and layout.sequence_parallel_size > 1,
         "DeepSpeed ignores sequence parallelism (Ulysses) in a pipeline"),
        (layout.tensor_parallel_size > 1 and layout.sequence_parallel_size > 1,
         "tensor-parallel ranks already share the sequences"),
        (layout.expert_parallel_size > 1 and layout.zero_stage == 0, "expert parallelism needs ZeRO stage 1 or higher"),
        (layout.expert_parallel_size > 1 and "nvme" in (optimizer, param),
         "DeepSpeed does not save experts that are on NVMe"),
        (layout.expert_parallel_size > 1 and layout.sequence_parallel_size > 1,
         "expert parallelism is without sequence parallelism"),
        (accumulates_in_other_dtype and layout.zero_stage == 0,
         "gradient accumulation in another dtype than the precision needs ZeRO stage 1 or higher"),
        (accumulates_in_other_dtype and layout.grad_accum_dtype != "fp32",
         "gradients can accumulate in the precision or in fp32 only"),
    )


def _cluster_constraints(layout: Layout, cluster: Cluster) -> tuple[tuple[bool, str], ...]:
    """List the constraints of the cluster (GPU and number of ranks) as (is it broken?, reason)."""
    ranks = _ranks_per_replica(layout)
    return (
        (layout.precision == "bf16" and not cluster.gpu.knows_bf16, f"{cluster.gpu.name} has no bf16"),
        (cluster.world_size % ranks != 0, f"{ranks} ranks that share a sample do not divide {cluster.world_size}"),
        (layout.stage_size % layout.expert_parallel_size != 0,
         f"{layout.expert_parallel_size} expert-parallel ranks do not divide the ranks of a pipeline stage"),
    )


def _model_constraints(layout: Layout, model: ModelConfig) -> tuple[tuple[bool, str], ...]:
    """List the constraints of the model's sizes as (is it broken?, reason)."""
    tensor, sequence, expert = layout.tensor_parallel_size, layout.sequence_parallel_size, layout.expert_parallel_size
    shards = max(tensor, sequence)  # ranks that share a sequence
    return (
        (layout.pipeline_stages > model.num_layers, f"more pipeline stages than {model.num_layers} layers"),
        (model.num_heads % shards != 0, f"{shards} ranks do not divide {model.num_heads} heads"),
        (model.num_kv_heads % tensor != 0, f"{tensor} ranks do not divide {model.num_kv_heads} key and value heads"),
        (layout.seq_length % shards != 0, f"{shards} ranks do not divide a sequence of {layout.seq_length}"),
        (sequence > 1 and model.num_experts > 0, "sequence parallelism is without experts"),
        (model.num_experts > 0 and expert % tensor != 0, "with experts, tensor-parallel ranks divide the experts too: "
         f"{expert} expert-parallel ranks are no multiple of {tensor}"),
        (expert > 1 and model.num_experts == 0, "the model has no experts"),
        (model.num_experts % expert != 0, f"{expert} ranks do not divide {model.num_experts} experts"),
        (model.position == "learned" and layout.seq_length > model.max_positions,
         f"the model has {model.max_positions} positions"),
    )
