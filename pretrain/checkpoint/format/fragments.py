"""Locate each parameter's fp32 weights and optimizer states, in a live engine and in the files that it writes.

DeepSpeed's optimizers update flat fp32 tensors. A flat tensor consists of fragments of parameters. Only this module
knows how each optimizer divides the parameters into fragments (DeepSpeed 0.19.8: the optimizers' constructors), and
which file `engine.save_checkpoint` writes each flat tensor to. `shard_index_rank_RRRRR.json` records both for the files
of one rank.
"""

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
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.engine.patches.pipeline import is_counted
from pretrain.model.parameters import Part, part_of

ParameterNames = dict[int, str]  # id(parameter) -> name


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of what a rank has of a parameter, within a flat tensor. All numbers count elements."""

    name: str  # as in engine.module.named_parameters()
    shape: tuple[int, ...]  # shape of the complete parameter
    start: int  # index of the first element in the flattened part, or in the flattened complete parameter
    length: int
    offset: int  # index of the first element in the flat tensor
    part: Part | None = None  # what this rank has under tensor or expert parallelism; None: the complete parameter


@dataclass(frozen=True)
class FileLocation:
    """Location of a value in a file that torch.save wrote: `load(file)[keys[0]][keys[1]] ...`."""

    file: str
    keys: tuple[str | int, ...]

    def at(self, *keys: str | int) -> "FileLocation":
        """Return the location of a value nested in this one."""
        return FileLocation(self.file, (*self.keys, *keys))


@dataclass(frozen=True)
class FlatTensor:
    """A tensor that the base optimizer updates: fp32 master weights or, in fp32 training, the weights themselves."""

    number: int  # the optimizer's index of this tensor; at ZeRO stage 3 the index of the sub-group
    parameter: torch.Tensor  # empty while it is swapped out to NVMe
    numel: int  # also right while `parameter` is empty
    fragments: tuple[Fragment, ...]
    files: tuple[FileLocation, FileLocation] | None  # locations of the tensor, and of the dict of its optimizer
    # states, in this rank's files; None: another rank writes them


def base_optimizer(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """Return the optimizer inside DeepSpeed's wrapper, or the optimizer itself if it is not wrapped."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def flat_tensors(engine: DeepSpeedEngine) -> list[FlatTensor]:
    """List all tensors that this rank's optimizer updates, in the optimizer's order."""
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


def complete_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the complete parameter, of which this rank may hold a part."""
    part = part_of(parameter)
    # after zero.Init, `shape` describes the ZeRO-3 partition
    return part.shape if part else tuple(getattr(parameter, "ds_shape", parameter.shape))


def _fragment(parameter: torch.Tensor, names: ParameterNames, *, start: int = 0, length: int | None = None,
              offset: int = 0) -> Fragment:
    return Fragment(names[id(parameter)], complete_shape(parameter), start,
                    parameter.numel() if length is None else length, offset, part_of(parameter))


def _fragments_between(start: int, stop: int, parameters: Iterable[torch.Tensor], offsets: Iterable[int],
                       names: ParameterNames) -> tuple[Fragment, ...]:
    """List the fragments in elements `start` to `stop` of a flat buffer. Each parameter begins at its offset."""
    fragments = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        first, last = max(offset, start), min(offset + parameter.numel(), stop)
        if first < last:
            fragments.append(_fragment(parameter, names, start=first - offset, length=last - first,
                                       offset=first - start))
    return tuple(fragments)


def _consecutive_offsets(parameters: list[torch.Tensor]) -> list[int]:
    return [0, *accumulate(parameter.numel() for parameter in parameters)][:-1]


def _model_file(engine: DeepSpeedEngine) -> FileLocation | None:
    """Return the location of `mp_rank_XX_model_states.pt`; None if another data-parallel rank writes this file."""
    return FileLocation(Path(engine._get_ckpt_name("", "")).name, ()) if engine.save_non_zero_checkpoint else None


def _optimizer_file(engine: DeepSpeedEngine) -> FileLocation:
    """Return the location of the optimizer's state in this rank's `*_optim_states.pt`."""
    return FileLocation(Path(engine._get_zero_ckpt_name("", "")).name, ("optimizer_state_dict",))


def _state_dict_numbers(groups: list[dict[str, Any]]) -> dict[int, int]:
    """Map id(parameter) to its number in torch's Optimizer.state_dict()."""
    return {id(p): number for number, p in enumerate(p for group in groups for p in group["params"])}


def _partitioned(engine: DeepSpeedEngine, names: ParameterNames) -> list[FlatTensor]:
    """List the flat tensors of ZeRO-1, ZeRO-2 or BF16_Optimizer.

    These flatten each parameter group and divide it evenly over the data-parallel ranks. DeepSpeed's `_hp_mapping` is
    not used, because it is wrong if round_robin_gradients reorders the parameters of a group.
    """
    optimizer, location, flats = engine.optimizer, _optimizer_file(engine), []
    bf16 = isinstance(optimizer, BF16_Optimizer)
    tensors = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    numbers = _state_dict_numbers(base_optimizer(engine).param_groups)
    for i, tensor in enumerate(tensors):
        parameters = optimizer.bf16_groups[i] if bf16 else optimizer.round_robin_bit16_groups[i]
        offsets = _consecutive_offsets(parameters)
        if hasattr(optimizer, "round_robin_bit16_offsets"):  # ZeRO from 0.19.8 on can put padding between parameters
            offsets = optimizer.round_robin_bit16_offsets[i]
        start = dist.get_rank(optimizer.real_dp_process_group[i]) * tensor.numel()
        flats.append(FlatTensor(
            i, tensor, tensor.numel(), _fragments_between(start, start + tensor.numel(), parameters, offsets, names),
            (location.at("single_partition_of_fp32_groups", i),
             location.at("base_optimizer_state", "state", numbers[id(tensor)]))))
    return flats


def _stage_3(engine: DeepSpeedEngine, names: ParameterNames) -> list[FlatTensor]:
    """List the flat tensors of ZeRO-3: one for each sub-group. Each parameter is divided evenly, with padding."""
    optimizer, location, flats = engine.optimizer, _optimizer_file(engine), []
    order = sorted(range(len(optimizer.fp16_groups)), key=lambda i: (optimizer.sub_group_to_group_id[i], i))
    numbers = {sub_group: number for number, sub_group in enumerate(order)}
    for i, parameters in enumerate(optimizer.fp16_groups):
        fragments, offset = [], 0
        for parameter in parameters:
            numel = parameter.partition_numel()
            start = dist.get_rank(group=parameter.ds_process_group) * numel
            length = min(numel, parameter.ds_numel - start)
            if length > 0:
                fragments.append(_fragment(parameter, names, start=start, length=length, offset=offset))
            offset += numel
        flats.append(FlatTensor(
            i, optimizer.fp32_partitioned_groups_flat[i], offset, tuple(fragments),
            (location.at("fp32_flat_groups", i), location.at("optimizer_state_dict", "state", numbers[i]))))
    return flats


def _fp16_fused(engine: DeepSpeedEngine, names: ParameterNames) -> list[FlatTensor]:
    """List the flat tensors of 16-bit training at ZeRO stage 0: one for each parameter group, equal on all ranks."""
    optimizer, file, flats = engine.optimizer, _model_file(engine), []
    location = file.at("optimizer") if file else None
    numbers = _state_dict_numbers(optimizer.optimizer.param_groups)
    for i, (tensor, parameters) in enumerate(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)):
        flats.append(FlatTensor(
            i, tensor, tensor.numel(),
            _fragments_between(0, tensor.numel(), parameters, _consecutive_offsets(parameters), names),
            (location.at("fp32_groups_flat", i),
             location.at("optimizer_state_dict", "state", numbers[id(tensor)])) if location else None))
    return flats


def _fp16_unfused(engine: DeepSpeedEngine, names: ParameterNames) -> list[FlatTensor]:
    """List the tensors of 16-bit training at ZeRO stage 0 with an unfused optimizer: one for each parameter."""
    optimizer, file = engine.optimizer, _model_file(engine)
    flats: list[FlatTensor] = []
    location = file.at("optimizer") if file else None
    numbers = _state_dict_numbers(optimizer.optimizer.param_groups)
    for i, (tensors, parameters) in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)):
        for j, (tensor, parameter) in enumerate(zip(tensors, parameters, strict=True)):
            flats.append(FlatTensor(
                len(flats), tensor, tensor.numel(), (_fragment(parameter, names),),
                (location.at("fp32_groups", i, j),
                 location.at("optimizer_state_dict", "state", numbers[id(tensor)])) if location else None))
    return flats


def _unwrapped(engine: DeepSpeedEngine, names: ParameterNames) -> list[FlatTensor]:
    """List the parameters of fp32 training at ZeRO stage 0.

    A pipeline stores them in the layers' files, a plain module in the model-states file. The second copy of a tied
    weight is in no file, because it equals the first copy.
    """
    file, layers = _model_file(engine), _layer_locations(engine)
    flats: list[FlatTensor] = []
    for parameter_id, number in _state_dict_numbers(engine.optimizer.param_groups).items():
        parameter, weights = layers[parameter_id]
        flats.append(FlatTensor(
            number, parameter, parameter.numel(), (_fragment(parameter, names),),
            (weights, file.at("optimizer", "state", number)) if file and weights else None))
    return flats


def _layer_locations(engine: DeepSpeedEngine) -> dict[int, tuple[torch.Tensor, FileLocation | None]]:
    """Map id(parameter) to (parameter, its location in this rank's files)."""
    file = _model_file(engine)
    if not isinstance(engine.module, PipelineModule):
        return {id(p): (p, file.at("module", name) if file else None) for name, p in engine.module.named_parameters()}
    locations: dict[int, tuple[torch.Tensor, FileLocation | None]] = {
        id(parameter): (parameter, None) for parameter in engine.module.parameters()}
    for index, layer in enumerate(engine.module.forward_funcs):
        if isinstance(layer, torch.nn.Module):  # DeepSpeed writes no file for plain functions
            layer_file = Path(engine.module.ckpt_layer_path("", index)).name
            locations |= {id(p): (p, FileLocation(layer_file, (key,))) for key, p in layer.named_parameters()}
    return locations


def group_of(engine: DeepSpeedEngine, flat: FlatTensor) -> int:
    """Return the index of the base optimizer's parameter group that a flat tensor belongs to."""
    # at ZeRO stage 3 the base optimizer's groups are filled only during a step
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return int(engine.optimizer.sub_group_to_group_id[flat.number])
    groups = base_optimizer(engine).param_groups
    return next(i for i, group in enumerate(groups) if any(p is flat.parameter for p in group["params"]))


def owned_weights(engine: DeepSpeedEngine) -> list[torch.Tensor] | None:
    """Return flat views of the weights that this rank counts: over all ranks, each parameter is counted exactly once.

    They are fp32 master weights, wherever the optimizer keeps them. At ZeRO stage 0 each data- or sequence-parallel
    rank counts a part of its copy. Only the first tensor-parallel rank counts parameters that are not divided. None
    while the weights are on NVMe.
    """
    replicated = {name for name, p in engine.module.named_parameters() if not is_counted(engine, p)}
    is_copied = engine.zero_optimization_stage() == 0 and not isinstance(engine.optimizer, BF16_Optimizer)
    group = engine.seq_data_parallel_group  # the ranks over which ZeRO partitions
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if is_copied else (0, 1)
    found = []
    for flat in flat_tensors(engine):
        if flat.parameter.numel() < flat.numel:
            return None
        for start, stop in _runs(flat, replicated):
            length = stop - start
            first, last = start + rank * length // ranks, start + (rank + 1) * length // ranks
            found.append(flat.parameter.detach().view(-1)[first:last])
    return found


def held_states(engine: DeepSpeedEngine) -> dict[str, list[torch.Tensor]] | None:
    """Return flat views of this rank's fp32 master weights and optimizer states, by their names, without padding.

    Parameters that the optimizer updates itself are no master weights. None while the states are on NVMe.
    """
    own = {id(parameter) for parameter in engine.module.parameters()}
    states, found = base_optimizer(engine).state, dict[str, list[torch.Tensor]]()
    for flat in flat_tensors(engine):
        if flat.parameter.numel() < flat.numel:
            return None
        held = {} if id(flat.parameter) in own else {"master": flat.parameter}
        for name, tensor in {**held, **states.get(flat.parameter, {})}.items():
            if torch.is_tensor(tensor):
                view = tensor.detach().reshape(-1)
                runs = _runs(flat, set()) if view.numel() == flat.numel else [(0, view.numel())]
                found.setdefault(name, []).extend(view[start:stop] for start, stop in runs)
    return found


def _runs(flat: FlatTensor, replicated: set[str]) -> list[tuple[int, int]]:
    """Return the parts of a flat tensor that have weights to count, without padding: (first element, end)."""
    runs: list[tuple[int, int]] = []
    for fragment in flat.fragments:
        if fragment.name in replicated:
            continue
        start, stop = fragment.offset, fragment.offset + fragment.length
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs
