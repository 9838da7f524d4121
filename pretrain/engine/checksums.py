"""Checksums of tensors, in which each flipped bit shows: of the parameters, the states and the reduced gradients."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

_WORD_BYTES = 8  # of int64
_CHUNK_WORDS = 2**20  # a tensor whose first byte is not aligned is copied in pieces of this size: 8 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2^64, of the tensor's bytes as 8-byte integers: a scalar on its device.

    A flipped bit changes the sum by a power of two below 2^64, so that it always shows. The tensor is read once,
    without a copy: a sum of smaller integers would first convert the whole tensor to int64.
    """
    flat = tensor.detach().reshape(-1)
    per_word = _WORD_BYTES // flat.element_size()
    whole = flat.numel() // per_word * per_word
    is_aligned = flat.storage_offset() % per_word == 0
    pieces = [flat[:whole]] if is_aligned else [piece.clone() for piece in flat[:whole].split(_CHUNK_WORDS * per_word)]
    sums = [piece.view(torch.int64).sum() for piece in pieces]
    if whole < flat.numel():
        sums.append(flat[whole:].view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def combined_checksum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one checksum of several tensors: a scalar on `device`. It changes if two tensors change places.

    Each checksum is multiplied by an odd number, so that a flipped bit still changes the sum modulo 2^64.
    """
    sums = [checksum(tensor).to(device, non_blocking=True) for tensor in tensors]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.stack(sums) * (2 * torch.arange(len(sums), device=device) + 1)).sum()


def is_complete(parameter: Any) -> bool:
    """Return whether each rank holds the complete parameter between two steps."""
    if not hasattr(parameter, "ds_tensor"):
        return True
    return bool(parameter.ds_persist and parameter.numel() == parameter.ds_numel)


def partition_of(parameter: Any) -> torch.Tensor | None:
    """Return this rank's partition of a parameter under ZeRO-3; None while it is on NVMe."""
    partition = parameter.ds_tensor
    return partition.data if partition.status == PartitionedParamStatus.AVAILABLE else None


def held_parameters(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return what this rank holds of each parameter between two steps, by name; nothing of those that are on NVMe.

    Under ZeRO-3 it is the partition without its padding, which DeepSpeed 0.19.8 does not initialize
    (runtime/zero/partition_parameters.py, _partition_param).
    """
    found = {}
    for name, parameter in engine.module.named_parameters():
        held = parameter.data if is_complete(parameter) else partition_of(parameter)
        if held is not None and not is_complete(parameter):
            rank = torch.distributed.get_rank(parameter.ds_process_group)
            held = held.view(-1)[:max(0, parameter.ds_numel - rank * held.numel())]
        if held is not None:
            found[name] = held
    return found


def reduced_gradients(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """Return this rank's part of the reduced gradients, before clipping. Call it right before the optimizer's step.

    DeepSpeed 0.19.8 keeps them in other places for each optimizer: see the constructors and `step` of these classes.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return list(optimizer.fp32_groups_gradient_flat_partition)
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        flats = optimizer.fp32_partitioned_groups_flat if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) \
            else optimizer.single_partition_of_fp32_groups
        averaged = [gradient for group in sorted(optimizer.averaged_gradients)
                    for gradient in optimizer.averaged_gradients[group] or ()]
        return averaged or [flat.grad for flat in flats if flat.grad is not None]
    return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
