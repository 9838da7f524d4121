"""Inventory of an engine: all its tensors by role and location, each storage once, and its files on NVMe.

For each DeepSpeed optimizer there is one small function, which uses the attribute names of DeepSpeed 0.19.8. All other
tensors that can be reached from the engine count as buffers, or as activations if they belong to a pipeline, so that no
tensor is left out.

Locations are as in a run on a GPU. On CUDA they are read from the tensors. If the accelerator is the CPU, all
tensors are in one memory, and the layout determines the location: the one that DeepSpeed would choose on a GPU.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.memory.footprint import Footprint
from pretrain.memory.storage_tracker import storage_of, walk_tensors

TensorEntry = tuple[str, str, torch.Tensor]  # role, location, tensor

_PIPELINE_TENSORS = ("pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf", "fwd_outputs", "total_loss",
                     "loss", "meta_buffer")
# Attributes with page-locked tensors. Tensors of the NVMe swappers are always page-locked, the others only with
# "pin_memory": true.
_ALWAYS_PINNED = ("all_buffers", "buffers", "partitioned_swap_buffer", "partitioned_swap_pool")
_PINNED_ON_REQUEST = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")


@dataclass(frozen=True)
class HeldStorage:
    """A storage that an engine holds."""

    role: str
    location: str
    size_bytes: int
    storage: int  # identity of the storage, valid while the storage is alive


def held_storages(engine: DeepSpeedEngine) -> list[HeldStorage]:
    """Return every storage that can be reached from the engine, each once."""
    found: dict[int, HeldStorage] = {}
    for role, location, tensor in engine_tensors(engine):
        storage = storage_of(tensor)
        if storage is None or storage._cdata in found or storage.nbytes() == 0:
            continue
        found[storage._cdata] = HeldStorage(role, _actual_location(engine, tensor, location), storage.nbytes(),
                                            storage._cdata)
    return list(found.values())


def footprint_of(held: Iterable[HeldStorage]) -> Footprint:
    """Sum the bytes of storages by role and location."""
    return Footprint.of(((item.role, item.location), item.size_bytes) for item in held)


def unaccounted_bytes(held: Iterable[HeldStorage], alive: Mapping[int, int]) -> int:
    """Sum the bytes of the storages that are alive but not in `held`. `alive` maps identities of storages to bytes."""
    known = {item.storage for item in held}
    return sum(size for storage, size in alive.items() if storage not in known)


def _actual_location(engine: DeepSpeedEngine, tensor: torch.Tensor, location: str) -> str:
    """Return the tensor's real location on CUDA; on a CPU return `location`, which follows from the layout."""
    if torch.device(engine.device).type == "cpu":
        return location
    if tensor.device.type != "cpu":
        return "device"
    return "pinned" if tensor.is_pinned() else "host"


def engine_tensors(engine: DeepSpeedEngine) -> Iterator[TensorEntry]:
    """Yield every tensor of the engine. If a storage is yielded several times, its first role is the right one."""
    yield from _reduction_buffers(engine)
    optimizer = engine.optimizer
    for optimizer_class, read_tensors in _READERS:
        if isinstance(optimizer, optimizer_class):
            yield from read_tensors(engine, optimizer)
    yield from _module_tensors(engine)
    yield from _base_optimizer_states(engine)
    yield from _other_tensors(engine)


def _entries(role: str, location: str, value: Any) -> Iterator[TensorEntry]:
    """Yield the tensors in a tensor, list or dictionary, also in nested ones."""
    if isinstance(value, torch.Tensor):
        yield role, location, value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _entries(role, location, part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _entries(role, location, part)


def _optimizer_location(engine: DeepSpeedEngine, *, pinned: bool) -> str:
    """Location of the optimizer's tensors: the device, or host memory if the optimizer is offloaded.

    Args:
        pinned: whether DeepSpeed pins this tensor if `pin_memory` is true.
    """
    offload = engine.zero_offload_optimizer()
    if _offload_device(offload) == "none":
        return "device"
    return "pinned" if pinned and offload.pin_memory else "host"


def _offload_device(offload: Any) -> str:
    """Device of an offload block of DeepSpeed's configuration: none, cpu or nvme. `offload` is None without a block."""
    device = "none" if offload is None else offload.device
    return str(getattr(device, "value", device))


def _reduction_buffers(engine: DeepSpeedEngine) -> Iterator[TensorEntry]:
    """Yield ZeRO's buckets. They must come first, because gradients may temporarily be views of buckets."""
    for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
        yield from _entries("buffers", "device", bucket.buffer)


def _zero_1_and_2(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[TensorEntry]:
    """DeepSpeedZeroOptimizer: flat 16-bit parameters, this rank's fp32 partition, gradients (zero/stage_1_and_2.py)."""
    location = _optimizer_location(engine, pinned=True)
    yield from _entries("parameters", "device", optimizer.bit16_groups_flat)
    for partition in optimizer.single_partition_of_fp32_groups:
        yield from _entries("master_weights", location, partition)
        yield from _entries("gradients", location, partition.grad)
    for attribute in ("averaged_gradients", "grads_in_partition", "all_grad_tensors", "previous_reduced_grads"):
        yield from _entries("gradients", "device", getattr(optimizer, attribute, None))
    yield from _entries("gradients", location, getattr(optimizer, "accumulated_grads_in_cpu", None))


def _zero_3(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[TensorEntry]:
    """DeepSpeedZeroOptimizer_Stage3 (zero/stage3.py).

    Its fp32 partitions are not pinned, because they are converted after pinning (_create_fp32_partitions). Offloaded
    parameters are always pinned.
    """
    parameter_location = "device" if _offload_device(engine.zero_offload_param()) == "none" else "pinned"
    gradient_location = _optimizer_location(engine, pinned=True)
    yield from _entries("parameters", parameter_location, getattr(optimizer, "lp_param_buffer", None))
    yield from _entries("parameters", parameter_location, optimizer.param_groups_fp16_flat_cpu_memory)
    for partition in optimizer.fp32_partitioned_groups_flat:
        yield from _entries("master_weights", _optimizer_location(engine, pinned=False), partition)
        yield from _entries("gradients", gradient_location, partition.grad)
    yield from _entries("gradients", gradient_location, optimizer.grad_partitions_flat_buffer)
    yield from _entries("gradients", "device", optimizer.averaged_gradients)


def _bf16(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[TensorEntry]:
    """BF16_Optimizer: the gradients of a parameter group are one flat tensor (runtime/bf16_optimizer.py)."""
    yield from _entries("parameters", "device", optimizer.bf16_groups_flat)
    yield from _entries("master_weights", "device", optimizer.fp32_groups_flat_partition)
    yield from _entries("gradients", "device", optimizer.fp32_groups_gradients_flat)


def _fp16(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[TensorEntry]:
    """FP16_Optimizer and FP16_UnfusedOptimizer of ZeRO stage 0 (runtime/fp16/)."""
    yield from _entries("parameters", "device", getattr(optimizer, "fp16_groups_flat", None))
    for attribute in ("fp32_groups_flat", "fp32_groups"):
        yield from _entries("master_weights", "device", getattr(optimizer, attribute, None))


_READERS = ((DeepSpeedZeroOptimizer, _zero_1_and_2), (DeepSpeedZeroOptimizer_Stage3, _zero_3), (BF16_Optimizer, _bf16),
            ((FP16_Optimizer, FP16_UnfusedOptimizer), _fp16))


def _module_tensors(engine: DeepSpeedEngine) -> Iterator[TensorEntry]:
    """Yield complete and partitioned parameters, their gradients under all of DeepSpeed's attributes, and buffers."""
    for parameter in engine.module.parameters():
        for attribute in ("grad", "grad_accum", "_hp_grad"):
            yield from _entries("gradients", "device", getattr(parameter, attribute, None))
        yield from _entries("parameters", "device", parameter.data)
        for attribute in ("ds_tensor", "ds_secondary_tensor"):
            yield from _entries("parameters", "device", getattr(parameter, attribute, None))
    for buffer in engine.module.buffers():
        yield "buffers", "device", buffer


def _base_optimizer_states(engine: DeepSpeedEngine) -> Iterator[TensorEntry]:
    """Yield the states of the wrapped optimizer, for example of Adam."""
    optimizer = engine.optimizer
    base, backup = getattr(optimizer, "optimizer", optimizer), getattr(optimizer, "backup_optimizer", None)
    yield from _entries("optimizer_states", _optimizer_location(engine, pinned=False), dict(getattr(base, "state", {})))
    yield from _entries("optimizer_states", "device", dict(getattr(backup, "state", {})))


def _other_tensors(engine: DeepSpeedEngine) -> Iterator[TensorEntry]:
    """Yield every tensor that can be reached from the engine through attributes and containers."""
    pinned = _optimizer_location(engine, pinned=True)
    for path, tensor in walk_tensors(engine):
        if path[:1] and path[0] in _PIPELINE_TENSORS:
            yield "activations", "device", tensor
        elif any(name in path for name in _ALWAYS_PINNED):
            yield "buffers", "pinned", tensor
        else:
            yield "buffers", pinned if any(name in path for name in _PINNED_ON_REQUEST) else "device", tensor


def nvme_footprint(engine: DeepSpeedEngine, rank: int) -> Footprint:
    """Return the bytes of one rank's swap files on disk, by role."""
    folders = {Path(offload.nvme_path, "zero_stage_3")
               for offload in (engine.zero_offload_optimizer(), engine.zero_offload_param())
               if _offload_device(offload) == "nvme"}
    return Footprint.of(((role_of_file(path), "nvme"), path.stat().st_size)
                        for folder in folders for path in folder.glob(f"*/rank{rank}/*.swp"))


def role_of_file(path: Path) -> str:
    """Return the role of a swap file, from its name (DeepSpeed's runtime/swap_tensor/, optimizer_utils.py)."""
    if path.name.endswith("_param.tensor.swp"):
        return "parameters"
    if "_gradient_" in path.name:
        return "gradients"
    words = path.name.split(".")[0].split("_")
    return "master_weights" if all(word.isdigit() for word in words) else "optimizer_states"
