"""Reject combinations that are impossible with DeepSpeed, the cluster or the model, and give the reason."""

from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.hardware import Cluster
from pretrain.memory.search.axes import OFFLOADS, Combination


def impossible_reason(choice: Combination, cluster: Cluster, shape: ModelShape | None) -> str:
    """Return why a combination is impossible, or "" if it is possible.

    Args:
        shape: None if the model's sizes are unknown. Then only DeepSpeed's and the cluster's constraints are checked.
    """
    # the model first: its constraints remain whatever else the user changes
    checks = () if shape is None else _model_constraints(choice, shape)
    checks += (*_deepspeed_constraints(choice), *_cluster_constraints(choice, cluster))
    return next((reason for broken, reason in checks if broken), "")


def _deepspeed_constraints(choice: Combination) -> tuple[tuple[bool, str], ...]:
    """List the constraints of DeepSpeed 0.19.8 as (is it broken?, reason)."""
    optimizer, param = OFFLOADS[choice.offload]
    accumulates_in_other_dtype = choice.grad_accum_dtype not in ("", choice.precision)
    return (
        (choice.pipeline_stages > 1 and choice.zero_stage >= 2, "pipelines need ZeRO stage 0 or 1"),
        (optimizer != "none" and choice.zero_stage == 0, "optimizer offload needs ZeRO stage 1 or higher"),
        (param != "none" and choice.zero_stage != 3, "parameter offload needs ZeRO stage 3"),
        (optimizer == "nvme" and choice.zero_stage != 3, "NVMe offload needs ZeRO stage 3"),
        (choice.pipeline_stages > 1 and choice.sequence_parallel_size > 1,
         "DeepSpeed ignores sequence parallelism (Ulysses) in a pipeline"),
        (choice.tensor_parallel_size > 1 and choice.sequence_parallel_size > 1,
         "tensor-parallel ranks already share the sequences"),
        (choice.expert_parallel_size > 1 and choice.zero_stage == 0, "expert parallelism needs ZeRO stage 1 or higher"),
        (choice.expert_parallel_size > 1 and "nvme" in (optimizer, param),
         "DeepSpeed does not save experts that are on NVMe"),
        (choice.expert_parallel_size > 1 and choice.model_parallel_size > 1,
         "expert parallelism is without pipeline stages, tensor and sequence parallelism"),
        (accumulates_in_other_dtype and choice.zero_stage == 0,
         "gradient accumulation in another dtype than the precision needs ZeRO stage 1 or higher"),
        (accumulates_in_other_dtype and choice.grad_accum_dtype != "fp32",
         "gradients can accumulate in the precision or in fp32 only"),
    )


def _cluster_constraints(choice: Combination, cluster: Cluster) -> tuple[tuple[bool, str], ...]:
    """List the constraints of the cluster (GPU and number of ranks) as (is it broken?, reason)."""
    ranks = choice.model_parallel_size
    zero_size = cluster.world_size // ranks * choice.sequence_parallel_size
    return (
        (choice.precision == "bf16" and not cluster.gpu.knows_bf16, f"{cluster.gpu.name} has no bf16"),
        (cluster.world_size % ranks != 0, f"{ranks} ranks that share a sample do not divide {cluster.world_size}"),
        (zero_size % choice.expert_parallel_size != 0,
         f"{choice.expert_parallel_size} expert-parallel ranks do not divide the data-parallel ranks"),
    )


def _model_constraints(choice: Combination, shape: ModelShape) -> tuple[tuple[bool, str], ...]:
    """List the constraints of the model's sizes as (is it broken?, reason)."""
    tensor, sequence = choice.tensor_parallel_size, choice.sequence_parallel_size
    shards = max(tensor, sequence)  # ranks that share a sequence
    return (
        (choice.pipeline_stages > shape.num_layers, f"more pipeline stages than {shape.num_layers} layers"),
        (shape.num_heads % shards != 0, f"{shards} ranks do not divide {shape.num_heads} heads"),
        (shape.num_kv_heads % tensor != 0, f"{tensor} ranks do not divide {shape.num_kv_heads} key and value heads"),
        (choice.seq_length % shards != 0, f"{shards} ranks do not divide a sequence of {choice.seq_length}"),
        (shards > 1 and shape.num_experts > 0, "ranks do not share the sequences of models with experts"),
        (choice.expert_parallel_size > 1 and shape.num_experts == 0, "the model has no experts"),
        (shape.num_experts % choice.expert_parallel_size != 0,
         f"{choice.expert_parallel_size} ranks do not divide {shape.num_experts} experts"),
        (shape.position == "learned" and choice.seq_length > shape.position_rows,
         f"the model has {shape.position_rows} positions"),
    )
