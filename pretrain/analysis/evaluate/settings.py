"""Choose the dtype of an evaluation, and whether the weights are partitioned over the ranks. Imports no torch."""

from pretrain.analysis.evaluate.source import EvaluationSource
from pretrain.config.layout import DTYPE_BYTES
from pretrain.distributed.device import Device
from pretrain.distributed.world import World
from pretrain.errors import ConfigError

_MAX_FRACTION = 0.8  # of the device's memory that complete weights may take; the rest is for activations and logits


def choose_dtype(source: EvaluationSource, device: Device, flag: str | None) -> str:
    """Return --dtype, by default the precision in which the model was trained, or fp32 if the device lacks it."""
    dtype = flag or source.precision
    supported = dtype == "fp32" or (device.bf16 if dtype == "bf16" else device.fp16)
    if flag is not None and not supported:
        raise ConfigError(f"--dtype {flag}", problem=f"this {device.kind} device does not support it",
                          remedy="use fp32" + " or bf16" * device.bf16)
    return dtype if supported else "fp32"


def choose_partition(source: EvaluationSource, dtype: str, device: Device, world: World, flag: bool | None) -> bool:
    """Return whether ZeRO-3 partitions the weights: as the flag says, or if they do not fit on a device.

    On CPUs, the ranks of a host share its memory.
    """
    if flag and world.size == 1:
        raise ConfigError("--partition_weights", problem="there is only one rank, which holds all weights",
                          remedy="start several ranks, for example with deepspeed --num_accelerators 2")
    if flag is not None or world.size == 1 or not device.memory_bytes:
        return bool(flag)
    copies = world.local_size if device.kind == "cpu" else 1
    return source.config.num_parameters() * DTYPE_BYTES[dtype] * copies > _MAX_FRACTION * device.memory_bytes
