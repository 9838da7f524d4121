"""Make and write the DeepSpeed JSON of a combination."""

import json
from pathlib import Path
from typing import Any

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.hardware import Cluster
from pretrain.memory.search.axes import OFFLOADS, Combination

_REDUCE_BUCKET = 2**24  # elements; 32 MiB in bf16
_NVME_BUFFER = 100_000_000  # elements, DeepSpeed's default of offload_param.buffer_size


def make_config(choice: Combination, *, micro_batch_size: int, accumulation_steps: int, cluster: Cluster,
                shape: ModelShape | None) -> dict[str, Any]:
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


def _zero_block(choice: Combination, cluster: Cluster, shape: ModelShape | None) -> dict[str, Any]:
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


def _reduce_bucket_size(choice: Combination, shape: ModelShape | None) -> int | str:
    """Return the elements of a bucket of gradients.

    "auto" is the square of the hidden size. Below stage 3 that is small for small models: their gradients would need
    hundreds of collectives, each with its latency.
    """
    if shape is None or choice.zero_stage == 3 or shape.hidden_size**2 >= _REDUCE_BUCKET:
        return "auto"
    return min(_REDUCE_BUCKET, shape.num_parameters())


def _nvme_buffer_size(cluster: Cluster, shape: ModelShape | None) -> int:
    """Return the elements of an NVMe buffer, which must hold one rank's part of the largest parameter."""
    if shape is None:
        return _NVME_BUFFER
    largest = max(tensor.size for layer in shape.layers() for tensor in layer.tensors)
    return max(_NVME_BUFFER, -(-largest // cluster.world_size))


def with_batch_sizes(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return a copy of a JSON in which missing and "auto" batch sizes are those of the layout."""
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
