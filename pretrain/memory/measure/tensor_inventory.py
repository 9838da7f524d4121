"""Every tensor that an engine holds, each storage once, by role and place; and its files on NVMe.

What DeepSpeed 0.19.8 calls them is in one small function for each of its optimizers; whatever else can be reached from
the engine counts as a buffer (or as an activation, where it is a pipeline's), so nothing is left out.

Places are those of a run on a GPU, also where the accelerator is the CPU and everything lies in one memory: then they
follow from the layout, as DeepSpeed's code would place each tensor. On CUDA each tensor is asked.
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
from pretrain.memory.measure.storage_tracker import storage_of

Entry = tuple[str, str, str, torch.Tensor]  # role, place, name, tensor

_PIPELINE_TENSORS = ("pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf", "fwd_outputs", "total_loss",
                     "loss", "meta_buffer")
_PINNED_ALWAYS = ("all_buffers", "buffers", "partitioned_swap_buffer", "partitioned_swap_pool")  # of NVMe swappers
_PINNED_IF_ASKED = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")


@dataclass(frozen=True)
class Holding:
    """One storage that an engine holds."""

    role: str
    place: str
    name: str  # where it was found
    size_bytes: int
    storage: int  # its identity, while it lives


def holdings(engine: DeepSpeedEngine) -> list[Holding]:
    """Every storage that can be reached from the engine, once."""
    found: dict[int, Holding] = {}
    for role, place, name, tensor in entries(engine):
        storage = storage_of(tensor)
        if storage is None or storage._cdata in found or storage.nbytes() == 0:
            continue
        found[storage._cdata] = Holding(role, _real_place(engine, tensor, place), name, storage.nbytes(),
                                        storage._cdata)
    return list(found.values())


def held(engine: DeepSpeedEngine) -> Footprint:
    """Bytes that this rank's engine holds in memory, by role and place."""
    return Footprint.of(((item.role, item.place), item.size_bytes) for item in holdings(engine))


def unaccounted(found: Iterable[Holding], alive: Mapping[int, int]) -> int:
    """Bytes of the storages in `alive` (bytes by identity, as a tracker counts them) that no holding names."""
    named = {item.storage for item in found}
    return sum(size for storage, size in alive.items() if storage not in named)


def _real_place(engine: DeepSpeedEngine, tensor: torch.Tensor, place: str) -> str:
    if torch.device(engine.device).type == "cpu":
        return place
    if tensor.device.type != "cpu":
        return "device"
    return "pinned" if tensor.is_pinned() else "host"


def entries(engine: DeepSpeedEngine) -> Iterator[Entry]:
    """Whatever the engine holds; where a storage comes several times the first role is its own."""
    yield from _reduction_buffers(engine)
    optimizer = engine.optimizer
    for kind, read in _READERS:
        if isinstance(optimizer, kind):
            yield from read(engine, optimizer)
    yield from _module_tensors(engine)
    yield from _base_states(engine)
    yield from _rest(engine)


def _of(role: str, place: str, name: str, value: Any) -> Iterator[Entry]:
    """The tensors in a tensor, list or dictionary, and behind them."""
    if isinstance(value, torch.Tensor):
        yield role, place, name, value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _of(role, place, name, part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _of(role, place, name, part)


def _offloaded(engine: DeepSpeedEngine, *, pinned: bool) -> str:
    """Where the optimizer's tensors lie: on the device, or in host memory if that was asked for.

    Args:
        pinned: whether DeepSpeed pins this tensor when `pin_memory` asks for it.
    """
    offload = engine.zero_offload_optimizer()
    if _device_of(offload) == "none":
        return "device"
    return "pinned" if pinned and offload.pin_memory else "host"


def _device_of(offload: Any) -> str:
    """none, cpu or nvme: of an offload block of DeepSpeed's configuration, or of None where there is none."""
    device = "none" if offload is None else offload.device
    return str(getattr(device, "value", device))


def _reduction_buffers(engine: DeepSpeedEngine) -> Iterator[Entry]:
    """ZeRO's buckets first: gradients may be views of them for a while."""
    for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
        yield from _of("buffers", "device", "ipg_buckets", bucket.buffer)


def _zero_1_and_2(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[Entry]:
    """DeepSpeedZeroOptimizer: flat 16-bit parameters, this rank's part in fp32, gradients (zero/stage_1_and_2.py)."""
    offloaded = _offloaded(engine, pinned=True)
    yield from _of("parameters", "device", "bit16_groups_flat", optimizer.bit16_groups_flat)
    for part in optimizer.single_partition_of_fp32_groups:
        yield from _of("master_weights", offloaded, "single_partition_of_fp32_groups", part)
        yield from _of("gradients", offloaded, "single_partition_of_fp32_groups.grad", part.grad)
    for name in ("averaged_gradients", "grads_in_partition", "all_grad_tensors", "previous_reduced_grads"):
        yield from _of("gradients", "device", name, getattr(optimizer, name, None))
    yield from _of("gradients", offloaded, "accumulated_grads_in_cpu",
                   getattr(optimizer, "accumulated_grads_in_cpu", None))


def _zero_3(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[Entry]:
    """DeepSpeedZeroOptimizer_Stage3. Its fp32 parts are converted after any pinning, so they are not pinned
    (zero/stage3.py, _create_fp32_partitions); offloaded parameters are pinned always.
    """
    params = "device" if _device_of(engine.zero_offload_param()) == "none" else "pinned"
    yield from _of("parameters", params, "lp_param_buffer", getattr(optimizer, "lp_param_buffer", None))
    yield from _of("parameters", params, "param_groups_fp16_flat_cpu_memory",
                   optimizer.param_groups_fp16_flat_cpu_memory)
    for part in optimizer.fp32_partitioned_groups_flat:
        yield from _of("master_weights", _offloaded(engine, pinned=False), "fp32_partitioned_groups_flat", part)
        yield from _of("gradients", _offloaded(engine, pinned=True), "fp32_partitioned_groups_flat.grad", part.grad)
    yield from _of("gradients", _offloaded(engine, pinned=True), "grad_partitions_flat_buffer",
                   optimizer.grad_partitions_flat_buffer)
    yield from _of("gradients", "device", "averaged_gradients", optimizer.averaged_gradients)


def _bf16(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[Entry]:
    """BF16_Optimizer: gradients of all parameters in one flat tensor a group (runtime/bf16_optimizer.py)."""
    yield from _of("parameters", "device", "bf16_groups_flat", optimizer.bf16_groups_flat)
    yield from _of("master_weights", "device", "fp32_groups_flat_partition", optimizer.fp32_groups_flat_partition)
    yield from _of("gradients", "device", "fp32_groups_gradients_flat", optimizer.fp32_groups_gradients_flat)


def _fp16(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[Entry]:
    """FP16_Optimizer and FP16_UnfusedOptimizer, of stage 0 (runtime/fp16/)."""
    yield from _of("parameters", "device", "fp16_groups_flat", getattr(optimizer, "fp16_groups_flat", None))
    for name in ("fp32_groups_flat", "fp32_groups"):
        yield from _of("master_weights", "device", name, getattr(optimizer, name, None))


_READERS = ((DeepSpeedZeroOptimizer, _zero_1_and_2), (DeepSpeedZeroOptimizer_Stage3, _zero_3), (BF16_Optimizer, _bf16),
            ((FP16_Optimizer, FP16_UnfusedOptimizer), _fp16))


def _module_tensors(engine: DeepSpeedEngine) -> Iterator[Entry]:
    """Parameters, whole and in parts, their gradients wherever DeepSpeed hangs them, and the model's own buffers."""
    for name, parameter in engine.module.named_parameters():
        for attribute in ("grad", "grad_accum", "_hp_grad"):
            yield from _of("gradients", "device", f"{name}.{attribute}", getattr(parameter, attribute, None))
        yield from _of("parameters", "device", name, parameter.data)
        for attribute in ("ds_tensor", "ds_secondary_tensor"):
            yield from _of("parameters", "device", f"{name}.{attribute}", getattr(parameter, attribute, None))
    for name, buffer in engine.module.named_buffers():
        yield "buffers", "device", name, buffer


def _base_states(engine: DeepSpeedEngine) -> Iterator[Entry]:
    """What the optimizer proper keeps a parameter: Adam's moments and the like."""
    optimizer = engine.optimizer
    for base in (getattr(optimizer, "optimizer", optimizer), getattr(optimizer, "backup_optimizer", None)):
        place = "device" if base is not getattr(optimizer, "optimizer", optimizer) else \
            _offloaded(engine, pinned=False)
        yield from _of("optimizer_states", place, "optimizer.state", dict(getattr(base, "state", {})))


def _rest(engine: DeepSpeedEngine) -> Iterator[Entry]:
    """Any other tensor that can be reached from the engine through attributes and containers."""
    pinned = _offloaded(engine, pinned=True)
    for path, tensor in _walk(engine):
        if path[:1] and path[0] in _PIPELINE_TENSORS:
            yield "activations", "device", ".".join(path), tensor
        elif any(name in path for name in _PINNED_ALWAYS):
            yield "buffers", "pinned", ".".join(path), tensor
        else:
            place = pinned if any(name in path for name in _PINNED_IF_ASKED) else "device"
            yield "buffers", place, ".".join(path), tensor


def _walk(root: object) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """(attribute names on the way, tensor) of all tensors that DeepSpeed's objects and containers hold."""
    seen, waiting = {id(root)}, [((), root)]  # type: tuple[set[int], list[tuple[tuple[str, ...], Any]]]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, torch.Tensor):
            yield path, node
            if node.is_leaf and node.grad is not None:
                yield (*path, "grad"), node.grad
        for name, part in _parts(node):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(((*path, name) if name else path, part))


def _parts(node: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(node, Mapping):
        return [("", part) for part in node.values()]
    if isinstance(node, (str, bytes, int, float, type)) or node is None:
        return []
    parts = [("", part) for part in node] if isinstance(node, (list, tuple, set, frozenset)) or \
        type(node).__name__ == "deque" else []
    ours = isinstance(node, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)) or \
        type(node).__module__.split(".")[0] in ("deepspeed", "pretrain")
    return [*parts, *vars(node).items()] if ours and hasattr(node, "__dict__") else parts


def nvme_files(engine: DeepSpeedEngine, rank: int) -> dict[Path, str]:
    """The files that offload to NVMe keeps for one rank, each with its role."""
    found: dict[Path, str] = {}
    for offload in (engine.zero_offload_optimizer(), engine.zero_offload_param()):
        if _device_of(offload) == "nvme":
            paths = Path(offload.nvme_path, "zero_stage_3").glob(f"*/rank{rank}/*.swp")
            found.update({path: role_of_file(path) for path in paths})
    return found


def role_of_file(path: Path) -> str:
    """Of a swap file, by DeepSpeed's names for them (runtime/swap_tensor/, optimizer_utils.py)."""
    if path.name.endswith("_param.tensor.swp"):
        return "parameters"
    if "_gradient_" in path.name:
        return "gradients"
    words = path.name.split(".")[0].split("_")
    return "master_weights" if all(word.isdigit() for word in words) else "optimizer_states"


def on_nvme(engine: DeepSpeedEngine, rank: int) -> Footprint:
    """Bytes of one rank's swap files as the disk has them."""
    return Footprint.of(((role, "nvme"), path.stat().st_size) for path, role in nvme_files(engine, rank).items())
