"""Find the fragments of each parameter in the files of a plain DeepSpeed engine, of ZeRO stage 0 to 3.

The engine and this program write the same flat tensors, which `format/fragments.py` describes for a live engine. Here
their layout is recomputed from what the files record: names and shapes of each group, and the number of ranks. Every
size must agree with the files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.fragments import FileLocation
from pretrain.checkpoint.format.shard_index import FP32, StoredFragment, StoredParameters
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.deepspeed.engine_files import (
    OPTIMIZER,
    SAME_CHECKPOINT,
    EngineFiles,
    Shape,
    SwappedFiles,
    base_state,
    module_tensors,
    param_groups,
    param_shapes,
    value_at,
)
from pretrain.extensions.adopt.mapping import names_by_shape, names_by_values

_LARGEST_PADDING = 128  # elements a rank; DeepSpeed 0.19.8 pads to a multiple of 2 elements a rank
_FLATS = {"partitioned": "single_partition_of_fp32_groups", "stage 3": "fp32_flat_groups"}


@dataclass
class FoundParameters:
    """The fragments of each parameter, and the states of each flat tensor."""

    stored: StoredParameters
    frozen: dict[str, Shape] = field(default_factory=dict)  # parameters without optimizer states
    files: set[Path] = field(default_factory=set)  # other files than those of EngineFiles
    steps: dict[str, float] = field(default_factory=dict)  # file -> steps that its optimizer has counted


def find_parameters(files: EngineFiles) -> FoundParameters:
    """Return where each parameter and its optimizer states lie. Raises ConfigError unless all sizes agree."""
    found = FoundParameters(StoredParameters(files.folder))
    if files.stage == 3:
        _add_stage_3(files, found)
    elif files.optimizer_files:
        _add_partitioned(files, found)
    else:
        _add_stage_0(files, found)
    for name, shape in found.stored.shapes.items():
        fragments = found.stored.fragments[name]
        fragments.sort(key=lambda fragment: fragment.start)
        assert sum(fragment.length for fragment in fragments) == prod(shape), name
    if len(set(found.steps.values())) > 1:
        first, other = (next(file for file, step in found.steps.items() if step == wanted)
                        for wanted in (min(found.steps.values()), max(found.steps.values())))
        raise ConfigError(str(files.folder / first), found=f"step {found.steps[first]:g} of the optimizer",
                          expected=f"{found.steps[other]:g}, as in {other}", remedy=SAME_CHECKPOINT)
    return found


def _add(found: FoundParameters, name: str, shape: Shape, start: int, length: int, offset: int,
         states: dict[str, FileLocation], group: dict[str, Any]) -> None:
    if found.stored.shapes.setdefault(name, shape) != shape:
        raise ConfigError(f"{found.stored.folder}: {shorten(name)}", problem="it has two shapes")
    found.stored.fragments.setdefault(name, []).append(StoredFragment(name, shape, start, length, offset, states=states,
                                                                      group=group))


def _states(files: EngineFiles, found: FoundParameters, at: FileLocation, numels: Iterable[int]) -> list[str]:
    """Return the optimizer states at a location that have a number for each weight, and record the numbers."""
    elementwise, sizes = [], set(numels)
    for key, value in value_at(files, at.file, *at.keys).items():
        if torch.is_tensor(value) and value.dim() > 0:
            if value.numel() not in sizes:
                raise ConfigError(f"{files.folder / at.file}: {shorten(str(key))}", found=f"{value.numel()} elements",
                                  expected=" or ".join(map(str, sorted(sizes))),
                                  remedy="only optimizers whose states have a number for each weight are read")
            elementwise.append(key)
        elif isinstance(value, (int, float)) or torch.is_tensor(value):
            # FusedAdam counts the steps of only the last parameter in a group, so the largest count is right
            found.stored.scalars[key] = max(float(value), found.stored.scalars.get(key, float(value)))
            if key == "step":
                found.steps[at.file] = max(float(value), found.steps.get(at.file, 0.0))
    found.stored.states |= dict.fromkeys((FP32, *elementwise))
    return elementwise


def _locations(weights: FileLocation, states: FileLocation, names: Iterable[str]) -> dict[str, FileLocation]:
    return {FP32: weights, **{name: states.at(name) for name in names}}


def _add_partitioned(files: EngineFiles, found: FoundParameters) -> None:
    """Add the parameters of ZeRO-1, ZeRO-2 or BF16_Optimizer: flat groups, divided evenly over the ranks."""
    shapes, world, groups = param_shapes(files), len(files.optimizer_files), param_groups(files)
    for number, group in enumerate(shapes):
        alignment = files.optimizer().get("param_alignment_paddings") or [[0] * len(each) for each in shapes]
        lengths = [prod(shape) + padding for shape, padding in zip(group.values(), alignment[number], strict=True)]
        offsets = [0, *accumulate(lengths)]
        sizes = [_partition_size(files, rank, number) for rank in range(world)]
        size, end = sizes[0], offsets[-1]
        if len(set(sizes)) > 1 or not end <= size * world < end + _LARGEST_PADDING * world:
            raise ConfigError(str(files.folder), found=f"partitions of {sizes} elements of parameter group {number}",
                              expected=f"equal ones, of {end} elements in all", remedy=SAME_CHECKPOINT)
        for rank, file in enumerate(files.optimizer_files):
            weights = FileLocation(file, (OPTIMIZER, _FLATS["partitioned"], number))
            lean = value_at(files, file, *weights.keys).numel()
            if lean < max(0, min(size, end - rank * size)):
                raise ConfigError(str(files.folder / file), found=f"{lean} elements of parameter group {number}",
                                  expected=f"{min(size, end - rank * size)}", remedy=SAME_CHECKPOINT)
            at = _group_states(files, rank, number)
            names = _states(files, found, at, (size, lean)) if at else []
            states = _locations(weights, at, names) if at else {FP32: weights}
            for (name, shape), offset in zip(group.items(), offsets, strict=False):
                first, last = max(offset, rank * size), min(offset + prod(shape), (rank + 1) * size)
                if first < last:
                    _add(found, name, shape, first - offset, last - first, first - rank * size, states,
                         groups[number] if number < len(groups) else {})
    _add_frozen(files, found)


def _partition_size(files: EngineFiles, rank: int, group: int) -> int:
    """Return the size of a rank's partition of a group, with padding, which ZeRO does not save."""
    file = files.optimizer_files[rank]
    saved = value_at(files, file, OPTIMIZER, _FLATS["partitioned"], group)
    is_bf16_optimizer = files.optimizer(rank).get("zero_stage") is None
    padding = 0 if is_bf16_optimizer else value_at(files, file, OPTIMIZER, "group_paddings", group)
    return int(saved.numel()) + int(padding)


def _group_states(files: EngineFiles, rank: int, group: int) -> FileLocation | None:
    """Return where the states of a rank's partition of a group lie; None: there are none yet."""
    state, at = base_state(files, rank), FileLocation(files.optimizer_files[rank], (OPTIMIZER, "base_optimizer_state"))
    if isinstance(state, list):
        return at.at(group)
    number = value_at(files, at.file, *at.keys, "param_groups", group, "params")[0]
    return at.at("state", number) if value_at(files, at.file, *at.keys, "state").get(number) else None


def _add_stage_3(files: EngineFiles, found: FoundParameters) -> None:
    """Add the parameters of ZeRO-3: each is divided evenly over the ranks, and lies in one sub-group."""
    shapes, world, groups = param_shapes(files), len(files.optimizer_files), param_groups(files)
    if files.contents[files.optimizer_files[0]].get("ds_config", {}).get("zero_optimization", {}).get(
            "mics_shard_size", -1) > 0 or files.optimizer().get("ds_zero_partition_groups"):
        raise ConfigError(str(files.folder), problem="parameters are divided over groups of ranks (MiCS, expert "
                          "parallelism), which is not read")
    group_of = [group for group in groups for _ in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for rank, file in enumerate(files.optimizer_files):
        flats = value_at(files, file, OPTIMIZER, _FLATS["stage 3"])
        if not len(flats) == len(shapes) == len(numbers):
            raise ConfigError(str(files.folder / file), found=f"{len(flats)} sub-groups",
                              expected=f"{len(shapes)}, as in {files.model_files[0]}",
                              remedy=SAME_CHECKPOINT)
        swapped = SwappedFiles.find(files.folder, rank, shapes, [*module_tensors(files)])
        for index, group in enumerate(shapes):
            parts = [-(-prod(shape) // world) for shape in group.values()]
            weights = FileLocation(file, (OPTIMIZER, _FLATS["stage 3"], index))
            at = FileLocation(file, (OPTIMIZER, OPTIMIZER, "state", numbers[index]))
            has_states = bool(value_at(files, file, *at.keys[:-1]).get(numbers[index]))
            is_swapped = flats[index].numel() == 0 and sum(parts) > 0
            if not is_swapped and flats[index].numel() != sum(parts):
                raise ConfigError(str(files.folder / file),
                                  found=f"{flats[index].numel()} elements of sub-group {index}",
                                  expected=f"{sum(parts)}, the parts of rank {rank} of {world}",
                                  remedy=SAME_CHECKPOINT)
            names = _states(files, found, at, (0 if is_swapped else sum(parts),)) if has_states else []
            states = swapped.locations(index, sum(parts), names) if is_swapped else _locations(weights, at, names)
            found.files |= {files.folder / location.file for location in states.values()} if is_swapped else set()
            offsets = accumulate(parts, initial=0)
            for (name, shape), part, offset in zip(group.items(), parts, offsets, strict=False):
                if (length := min(part, prod(shape) - rank * part)) > 0:
                    _add(found, name, shape, rank * part, length, offset, states, group_of[index])
    _add_frozen(files, found)


def _add_frozen(files: EngineFiles, found: FoundParameters) -> None:
    """Add the parameters that the optimizer does not have: complete, or at stage 3 divided like all others."""
    frozen = files.model.get("frozen_param_shapes") or {}
    shapes = {name: tuple(shape) for name, shape in frozen.items()} if files.stage == 3 else \
        {name: tuple(tensor.shape) for name, tensor in module_tensors(files).items()}
    for name, shape in shapes.items():
        if name in found.stored.shapes:
            continue
        found.frozen[name] = shape
        world, key = (len(files.model_files), "frozen_param_fragments") if files.stage == 3 else (1, "module")
        part = -(-prod(shape) // world)
        for rank, file in enumerate(files.model_files):
            at = FileLocation(file, (key, name))
            if value_at(files, file, *at.keys).numel() < part:
                raise ConfigError(f"{files.folder / file}: {name}", problem=f"{key} has fewer than {part} elements of "
                                  "this frozen parameter")
            if (length := min(part, prod(shape) - rank * part)) > 0:
                _add(found, name, shape, rank * part, length, 0, {FP32: at}, {})


def _add_stage_0(files: EngineFiles, found: FoundParameters) -> None:
    """Add the parameters of ZeRO stage 0: complete ones, or one flat tensor for each group."""
    tensors, file, optimizer = module_tensors(files), files.model_files[0], files.model.get("optimizer")
    where = str(files.folder / file)
    if not optimizer:
        for name, tensor in tensors.items():
            states = {FP32: FileLocation(file, ("module", name))}
            _add(found, name, tuple(tensor.shape), 0, tensor.numel(), 0, states, {})
        return
    groups, wrapped = param_groups(files), OPTIMIZER in optimizer
    root = FileLocation(file, ("optimizer", OPTIMIZER) if wrapped else ("optimizer",))
    if "fp32_groups_flat" in optimizer:
        flats = optimizer["fp32_groups_flat"]
        for number, names in enumerate(names_by_values(where, flats, tensors)):
            at, weights = root.at("state", groups[number]["params"][0]), FileLocation(
                file, ("optimizer", "fp32_groups_flat", number))
            keys = _states(files, found, at, (flats[number].numel(),)) if optimizer[OPTIMIZER]["state"] else []
            offsets = accumulate((tensors[name].numel() for name in names), initial=0)
            for name, offset in zip(names, offsets, strict=False):
                _add(found, name, tuple(tensors[name].shape), 0, tensors[name].numel(), offset,
                     _locations(weights, at, keys), groups[number])
        return
    masters: Sequence[Sequence[torch.Tensor]] | None = optimizer.get("fp32_groups") if wrapped else None

    def weights_at(group: int, position: int, name: str) -> FileLocation:
        keys = ("module", name) if masters is None else ("optimizer", "fp32_groups", group, position)
        return FileLocation(file, keys)

    add_torch_optimizer(files, found, root, tensors, weights_at, masters)


def add_torch_optimizer(files: EngineFiles, found: FoundParameters, root: FileLocation,
                        tensors: Mapping[str, torch.Tensor], weights_at: Callable[[int, int, str], FileLocation],
                        masters: Sequence[Sequence[torch.Tensor]] | None = None) -> None:
    """Add the parameters of an optimizer that has each of them as a tensor of its own.

    Args:
        root: of the optimizer's state_dict.
        tensors: all parameters in the order of the model; they may be on the meta device.
        weights_at: location of the weights, by number of the group, position in it, and name.
        masters: fp32 weights of each group, if the optimizer has them.
    """
    where, groups = str(files.folder / root.file), list(value_at(files, root.file, *root.keys, "param_groups"))
    state = value_at(files, root.file, *root.keys, "state")
    for number, names in enumerate(names_by_shape(where, groups, state, tensors, masters)):
        for position, (name, index) in enumerate(zip(names, groups[number]["params"], strict=True)):
            shape, at = tuple(tensors[name].shape), root.at("state", index)
            keys = _states(files, found, at, (prod(shape),)) if state else []
            _add(found, name, shape, 0, prod(shape), 0, _locations(weights_at(number, position, name), at, keys),
                 groups[number])
