"""Where each parameter's fp32 weights and optimizer states lie, in a live engine and in the files that it writes.

DeepSpeed's optimizers step flat fp32 tensors, each made of fragments of parameters. This file alone knows how each of
them cuts the parameters up (DeepSpeed 0.19.8: the optimizers' constructors) and where `save_checkpoint` puts the
result. `shard_index_rank_RRRRR.json` says it for the files of one rank.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

Names = dict[int, str]  # id of a parameter -> its name


@dataclass(frozen=True)
class Fragment:
    """A piece of a parameter; numbers count elements."""

    name: str  # as in engine.module.named_parameters()
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # within the whole parameter, flattened
    length: int
    offset: int  # within the flat tensor


@dataclass(frozen=True)
class FileLocation:
    """A value in a file that torch.save wrote: `load(file)[keys[0]][keys[1]] ...`."""

    file: str
    keys: tuple[str | int, ...]

    def at(self, *keys: str | int) -> "FileLocation":
        return FileLocation(self.file, (*self.keys, *keys))


@dataclass(frozen=True)
class FlatTensor:
    """A tensor that the base optimizer steps: fp32 master weights (or those of fp32 training themselves)."""

    number: int  # the optimizer's own: its sub-group at stage 3
    parameter: torch.Tensor  # empty while it is swapped out to NVMe
    numel: int
    fragments: tuple[Fragment, ...]
    weights: FileLocation | None  # where this rank's files hold it; None: another rank's do
    states: FileLocation | None  # the dict of its optimizer states; likewise


def base_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The one inside DeepSpeed's wrapper, if there is a wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def flat_tensors(engine: DeepSpeedEngine) -> list[FlatTensor]:
    """Everything that this rank's optimizer steps, in the optimizer's order."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _stage_3(engine, names)
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        return _partitioned(engine, names)
    if isinstance(optimizer, FP16_Optimizer):
        return _fp16_fused(engine, names)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        return _fp16_unfused(engine, names)
    return _unwrapped(engine, names)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # under zero.Init the own one is that of a part


def _cut(parameters: Iterable[torch.Tensor], offsets: Iterable[int], start: int, stop: int,
         names: Names) -> tuple[Fragment, ...]:
    """The fragments in elements `start` to `stop` of a row in which each parameter begins at its offset."""
    cut = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        first, last = max(offset, start), min(offset + parameter.numel(), stop)
        if first < last:
            cut.append(Fragment(names[id(parameter)], _shape(parameter), first - offset, last - first, first - start))
    return tuple(cut)


def _one_after_another(parameters: list[torch.Tensor]) -> list[int]:
    return [0, *accumulate(parameter.numel() for parameter in parameters)][:-1]


def _model_file(engine: DeepSpeedEngine) -> FileLocation | None:
    """`mp_rank_XX_model_states.pt`: the first data-parallel rank writes it."""
    return FileLocation(Path(engine._get_ckpt_name("", "")).name, ()) if engine.save_non_zero_checkpoint else None


def _optimizer_file(engine: DeepSpeedEngine) -> FileLocation:
    """`*_optim_states.pt`: every rank has its own."""
    return FileLocation(Path(engine._get_zero_ckpt_name("", "")).name, ("optimizer_state_dict",))


def _numbers(groups: list[dict[str, Any]]) -> dict[int, int]:
    """How torch's Optimizer.state_dict numbers its parameters."""
    return {id(p): number for number, p in enumerate(p for group in groups for p in group["params"])}


def _partitioned(engine: DeepSpeedEngine, names: Names) -> list[FlatTensor]:
    """ZeRO-1, ZeRO-2 and BF16_Optimizer: each parameter group in a row, cut evenly over the data-parallel ranks.

    Their own `_hp_mapping` is wrong under round_robin_gradients, which changes the order in the row.
    """
    optimizer, place, flats = engine.optimizer, _optimizer_file(engine), []
    bf16 = isinstance(optimizer, BF16_Optimizer)
    tensors = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    numbers = _numbers(base_optimizer(engine).param_groups)
    for i, tensor in enumerate(tensors):
        parameters = optimizer.bf16_groups[i] if bf16 else optimizer.round_robin_bit16_groups[i]
        offsets = _one_after_another(parameters) if bf16 else optimizer.round_robin_bit16_offsets[i]
        start = dist.get_rank(optimizer.real_dp_process_group[i]) * tensor.numel()
        flats.append(FlatTensor(
            i, tensor, tensor.numel(), _cut(parameters, offsets, start, start + tensor.numel(), names),
            place.at("single_partition_of_fp32_groups", i),
            place.at("base_optimizer_state", "state", numbers[id(tensor)])))
    return flats


def _stage_3(engine: DeepSpeedEngine, names: Names) -> list[FlatTensor]:
    """ZeRO-3: sub-groups of parameters, each parameter cut evenly over the ranks, the last piece padded."""
    optimizer, place, flats = engine.optimizer, _optimizer_file(engine), []
    order = sorted(range(len(optimizer.fp16_groups)), key=lambda i: (optimizer.sub_group_to_group_id[i], i))
    numbers = {sub_group: number for number, sub_group in enumerate(order)}
    for i, parameters in enumerate(optimizer.fp16_groups):
        fragments, offset = [], 0
        for parameter in parameters:
            part = parameter.partition_numel()
            start = optimizer._get_param_partition_rank(parameter) * part
            length = min(part, parameter.ds_numel - start)
            if length > 0:
                fragments.append(Fragment(names[id(parameter)], _shape(parameter), start, length, offset))
            offset += part
        flats.append(FlatTensor(
            i, optimizer.fp32_partitioned_groups_flat[i], offset, tuple(fragments), place.at("fp32_flat_groups", i),
            place.at("optimizer_state_dict", "state", numbers[i])))
    return flats


def _fp16_fused(engine: DeepSpeedEngine, names: Names) -> list[FlatTensor]:
    """16-bit stage 0: each parameter group in a row, the same on every data-parallel rank."""
    optimizer, file, flats = engine.optimizer, _model_file(engine), []
    place = file.at("optimizer") if file else None
    numbers = _numbers(optimizer.optimizer.param_groups)
    for i, (tensor, parameters) in enumerate(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)):
        flats.append(FlatTensor(
            i, tensor, tensor.numel(), _cut(parameters, _one_after_another(parameters), 0, tensor.numel(), names),
            place.at("fp32_groups_flat", i) if place else None,
            place.at("optimizer_state_dict", "state", numbers[id(tensor)]) if place else None))
    return flats


def _fp16_unfused(engine: DeepSpeedEngine, names: Names) -> list[FlatTensor]:
    """16-bit stage 0 with an optimizer that is not fused: a master tensor for each parameter."""
    optimizer, file = engine.optimizer, _model_file(engine)
    flats: list[FlatTensor] = []
    place = file.at("optimizer") if file else None
    numbers = _numbers(optimizer.optimizer.param_groups)
    for i, (tensors, parameters) in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)):
        for j, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
            flats.append(FlatTensor(
                len(flats), tensor, tensor.numel(), _cut([parameter], [0], 0, tensor.numel(), names),
                place.at("fp32_groups", i, j) if place else None,
                place.at("optimizer_state_dict", "state", numbers[id(tensor)]) if place else None))
    return flats


def _unwrapped(engine: DeepSpeedEngine, names: Names) -> list[FlatTensor]:
    """fp32 at stage 0: the optimizer steps the parameters themselves, which lie in the layers' files.

    The second copy of a tied weight is in no file; the first one is the same.
    """
    file, layers = _model_file(engine), _layer_places(engine)
    flats: list[FlatTensor] = []
    for parameter_id, number in _numbers(engine.optimizer.param_groups).items():
        parameter = layers[parameter_id][0]
        weights = layers[parameter_id][1] if file else None
        flats.append(FlatTensor(
            number, parameter, parameter.numel(), _cut([parameter], [0], 0, parameter.numel(), names), weights,
            file.at("optimizer", "state", number) if file and weights else None))
    return flats


def _layer_places(engine: DeepSpeedEngine) -> dict[int, tuple[torch.Tensor, FileLocation | None]]:
    """By id: each parameter of this stage, and its place in a `layer_XX-model_states.pt`."""
    places: dict[int, tuple[torch.Tensor, FileLocation | None]] = {id(p): (p, None) for p in engine.module.parameters()}
    for index, layer in enumerate(engine.module.forward_funcs):
        if isinstance(layer, torch.nn.Module):  # the others are written to no file
            file = Path(engine.module.ckpt_layer_path("", index)).name
            places |= {id(p): (p, FileLocation(file, (key,))) for key, p in layer.named_parameters()}
    return places


def index_name(rank: int) -> str:
    return f"shard_index_rank_{rank:05d}.json"


def index_json(engine: DeepSpeedEngine) -> str:
    """What `save_checkpoint` puts where, for the files of this rank: JSON, read by reader.py.

    "optimizer": class of the base optimizer; "groups": its parameter groups' numbers (lr, betas ...); "tensors": one
    entry a flat tensor. A state is "elementwise" (a number for each weight) or one of the "scalars" (step ...).
    """
    optimizer = base_optimizer(engine)
    groups = optimizer.param_groups
    entries = [_entry(flat, optimizer.state.get(flat.parameter, {}), group_of(engine, flat))
               for flat in flat_tensors(engine) if flat.weights and flat.fragments]
    return json.dumps({"optimizer": type(optimizer).__name__, "groups": [_numbers_of(group) for group in groups],
                       "tensors": entries}, separators=(",", ":"))


def group_of(engine: DeepSpeedEngine, flat: FlatTensor) -> int:
    """The number of the parameter group of the base optimizer that a flat tensor is stepped with."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):  # its groups are filled only while it steps
        return int(engine.optimizer.sub_group_to_group_id[flat.number])
    groups = base_optimizer(engine).param_groups
    return next(i for i, group in enumerate(groups) if any(p is flat.parameter for p in group["params"]))


def is_elementwise(value: Any, flat: FlatTensor) -> bool:
    """Whether a state has a number for each weight; what is swapped out is an empty tensor, and has."""
    return torch.is_tensor(value) and value.dim() > 0 and value.numel() in (flat.numel, 0)


def _entry(flat: FlatTensor, state: dict[str, Any], group: int) -> dict[str, Any]:
    assert flat.weights is not None
    assert flat.states is not None
    scalars = {key: float(value) for key, value in state.items()
               if isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0)}
    elementwise = [key for key, value in state.items() if is_elementwise(value, flat)]
    other = [key for key, value in state.items()
             if key not in scalars and key not in elementwise and torch.is_tensor(value)]
    return {"group": group, "weights": [flat.weights.file, flat.weights.keys],
            "states": [flat.states.file, flat.states.keys], "elementwise": elementwise, "scalars": scalars,
            "other": other, "fragments": [[f.name, f.shape, f.start, f.length, f.offset] for f in flat.fragments]}


def _numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group that are numbers, or rows of them."""

    def plain(value: Any) -> Any:
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else float(value)

    return {key: plain(value) for key, value in group.items()
            if key != "params" and not isinstance(value, (bool, str)) and value is not None}
