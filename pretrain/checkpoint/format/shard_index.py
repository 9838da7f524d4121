"""The shard indexes of a checkpoint: one JSON file for each rank, with the location of each weight in its files.

Its keys are:

- "format": 2 if the rank holds parts of parameters (tensor or expert parallelism); otherwise missing;
- "optimizer": class name of the base optimizer;
- "groups": numeric settings (lr, betas ...) of each parameter group of this optimizer;
- "tensors": location, fragments and optimizer states of each flat tensor that the rank writes, padding aside.

A tensor's entry lists an optimizer state under "elementwise" if the state has a number for each weight, under "scalars"
if it is a single number (step ...), and under "other" if it is a tensor of another size. A fragment is [name, shape of
the complete parameter, start, length, offset], and for a part also [dim, ranges] of the part.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from deepspeed import DeepSpeedEngine
from torch import nn

from pretrain.checkpoint.format.fragments import (
    FileLocation,
    FlatTensor,
    Fragment,
    base_optimizer,
    flat_tensors,
    group_of,
)
from pretrain.errors import ConfigError, file_errors
from pretrain.model.parameters import Part
from pretrain.paths import for_each_file
from pretrain.stored_json import build, parse_json, read_text

# buffers of the model by name: a key of each model-states file, or a file of a checkpoint of weights alone
BUFFERS, BUFFERS_FILE = "buffers", "buffers.safetensors"
FP32 = "fp32"  # name under which the master weights are listed with the optimizer states
FORMAT_WITH_PARTS = 2  # format of an index that has parts of parameters; indexes without "format" have none
# class name -> its name of a state -> the family's name; None: the class stores this state but never uses it
_RENAMED_STATES: dict[str, dict[str, str | None]] = {
    "DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}, "DeepSpeedCPULion": {"exp_avg_sq": None}}


def index_name(rank: int) -> str:
    """Return the file name of a rank's shard index."""
    return f"shard_index_rank_{rank:05d}.json"


def index_json(engine: DeepSpeedEngine) -> str:
    """Return the text of the shard index of this rank's files."""
    optimizer = base_optimizer(engine)
    groups = optimizer.param_groups
    entries = []
    for flat in flat_tensors(engine):
        if flat.files is not None and flat.fragments:
            entries.append(tensor_entry(*flat.files, flat.fragments, group=group_of(engine, flat),
                                        **_states_by_size(flat, optimizer.state.get(flat.parameter, {}))))
    return index_text(type(optimizer).__name__, [_numeric_settings(group) for group in groups], entries)


def index_text(optimizer: str, groups: list[dict[str, Any]], entries: list[dict[str, Any]]) -> str:
    """Return the text of a shard index with these entries of tensors."""
    has_parts = any(len(fragment) > 5 for entry in entries for fragment in entry["fragments"])
    index: dict[str, Any] = {"format": FORMAT_WITH_PARTS} if has_parts else {}
    index |= {"optimizer": optimizer, "groups": groups, "tensors": entries}
    return json.dumps(index, separators=(",", ":"))


def tensor_entry(weights: FileLocation, states: FileLocation, fragments: Iterable[Fragment], *, group: int = 0,
                 elementwise: Sequence[str] = (), scalars: Mapping[str, float] | None = None,
                 other: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entry of a flat tensor."""
    return {"group": group, "weights": [weights.file, weights.keys], "states": [states.file, states.keys],
            "elementwise": elementwise, "scalars": scalars or {}, "other": other,
            "fragments": [_fragment_values(fragment) for fragment in fragments]}


def _fragment_values(fragment: Fragment) -> list[Any]:
    found = [fragment.name, fragment.shape, fragment.start, fragment.length, fragment.offset]
    return found if fragment.part is None else [*found, [fragment.part.dim, fragment.part.ranges]]


def is_elementwise(value: Any, flat: FlatTensor) -> bool:
    """Return whether an optimizer state has a number for each weight.

    An empty tensor counts too, because a state that is swapped out to NVMe is empty.
    """
    return torch.is_tensor(value) and value.dim() > 0 and value.numel() in (flat.numel, 0)


def _states_by_size(flat: FlatTensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer states of a flat tensor by size, as the arguments of `tensor_entry`."""
    scalars = {key: float(value) for key, value in state.items()
               if isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0)}
    elementwise = [key for key, value in state.items() if is_elementwise(value, flat)]
    other = [key for key, value in state.items()
             if key not in scalars and key not in elementwise and torch.is_tensor(value)]
    return {"elementwise": elementwise, "scalars": scalars, "other": other}


def _numeric_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that are numbers or lists of numbers and None (eps of Adafactor)."""

    def as_floats(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [as_floats(item) for item in value]
        return None if value is None else float(value)

    return {key: as_floats(value) for key, value in group.items()
            if key != "params" and not isinstance(value, (bool, str)) and value is not None}


def state_name(class_name: str, key: str) -> str | None:
    """Return the family's name of the state `key` of an optimizer class; None if the class never uses the state."""
    return _RENAMED_STATES.get(class_name, {}).get(key, key)


@dataclass(frozen=True, kw_only=True)
class StoredFragment(Fragment):
    """A fragment in the checkpoint's files."""

    states: dict[str, FileLocation]  # flat tensors: weights (FP32), and optimizer states by the family's names
    group: dict[str, Any]  # settings of the parameter group (lr, betas ...)


@dataclass
class StoredParameters:
    """Content of all shard indexes of a checkpoint."""

    folder: Path
    optimizer: str = ""  # class name of the base optimizer
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of complete parameters
    fragments: dict[str, list[StoredFragment]] = field(default_factory=dict)  # without copies
    states: dict[str, None] = field(default_factory=dict)  # FP32, and the names of elementwise optimizer states
    scalars: dict[str, float] = field(default_factory=dict)


def read_index_texts(folder: Path) -> dict[str, str]:
    """Return the text of each shard index by its file's name. Raises ConfigError if one cannot be read."""
    paths = sorted(folder.glob("shard_index_rank_*.json"))
    return dict(zip([path.name for path in paths], for_each_file(_text_of, paths), strict=True))


def _text_of(path: Path) -> str:
    with file_errors(path, "the shard index cannot be read: {}", "use another checkpoint", (OSError, ValueError)):
        return read_text(path)


def parse_shard_indexes(folder: Path, texts: Mapping[str, str]) -> StoredParameters:
    """Return the content of all shard indexes of a checkpoint, as `read_index_texts` returned them.

    Raises ConfigError if one is damaged, or if they do not cover a parameter.
    """
    found = StoredParameters(folder)
    for name, text in texts.items():
        _add_index(found, folder / name, text)
    if not found.fragments:
        raise ConfigError(str(folder), problem="there is no shard_index_rank_*.json with weights",
                          remedy="use a checkpoint that this program wrote")
    for name, shape in found.shapes.items():
        found.fragments[name] = _without_copies(f"{folder}: {name}", shape, found.fragments[name])
    return found


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(str(path), problem=f"the shard index cannot be read: {type(error).__name__} ({error})",
                       remedy="use another checkpoint")


def _add_index(found: StoredParameters, path: Path, text: str) -> None:
    try:
        index = build(dict[str, Any], parse_json(text))
        index_format = index.get("format", 1)
        if index_format in (1, FORMAT_WITH_PARTS):
            found.optimizer = index["optimizer"]
            for entry in index["tensors"]:
                _add_tensor(found, entry, index["groups"])
            return
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _unreadable(path, error) from None
    raise ConfigError(f"{path}: format", found=repr(index_format), expected=f"at most {FORMAT_WITH_PARTS}",
                      remedy="a newer version of this program wrote the checkpoint; update this one")


def _add_tensor(found: StoredParameters, entry: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    weights, states = (FileLocation(entry[key][0], tuple(entry[key][1])) for key in ("weights", "states"))
    named = {FP32: weights, **{name: states.at(key) for key in entry["elementwise"]
                               if (name := state_name(found.optimizer, key)) is not None}}
    # FusedAdam updates the step count of only the last parameter in a group, so the largest count is right
    if entry["scalars"].get("step", 0) >= found.scalars.get("step", 0):
        found.scalars |= entry["scalars"]
    for name, shape, start, length, offset, *part in entry["fragments"]:
        if found.shapes.setdefault(name, tuple(shape)) != tuple(shape):
            raise ValueError(f"{name} has the shapes {shape} and {list(found.shapes[name])}")
        found.fragments.setdefault(name, []).append(StoredFragment(
            name, tuple(shape), start, length, offset, _part(name, tuple(shape), start + length, *part),
            states=named, group=groups[entry["group"]]))
    found.states |= dict.fromkeys(named)


def _part(name: str, shape: tuple[int, ...], end: int, recorded: list[Any] | None = None) -> Part | None:
    """Return a recorded part. Raises ValueError if it is not one of a parameter with this shape, or is too small."""
    if recorded is None:
        return None
    dim, ranges = recorded
    part = Part(shape, dim, tuple((start, stop) for start, stop in ranges))
    if not 0 <= dim < len(shape) or not all(0 <= start <= stop <= shape[dim] for start, stop in part.ranges) or \
            end > prod(part.local_shape):
        raise ValueError(f"{name} has the shape {list(shape)}, and no part {recorded} with {end} elements")
    return part


def _without_copies(where: str, shape: tuple[int, ...], fragments: list[StoredFragment]) -> list[StoredFragment]:
    """Return fragments that cover the parameter, without copies that several ranks have written.

    Two pipeline stages write a weight that they share. All tensor-parallel ranks write a parameter that none of them
    divides. Raises ConfigError if an element is in no fragment.
    """
    by_part: dict[Part | None, list[StoredFragment]] = {}
    for fragment in fragments:
        by_part.setdefault(fragment.part, []).append(fragment)
    if None in by_part:
        return _covering(where, prod(shape), by_part[None])
    parts = [part for part in by_part if part is not None]
    _check_ranges(where, shape, parts)
    return [fragment for part in parts
            for fragment in _covering(where, prod(part.local_shape), by_part[part], f" of {part.ranges}")]


def _covering(where: str, numel: int, fragments: list[StoredFragment], what: str = "") -> list[StoredFragment]:
    """Return fragments of one part, ordered by their first elements, that cover all its elements."""
    covered, chosen = 0, []
    for fragment in sorted(fragments, key=lambda fragment: fragment.start):
        if fragment.start > covered:
            break
        if fragment.start + fragment.length > covered:
            chosen.append(fragment)
            covered = fragment.start + fragment.length
    if covered != numel:
        raise ConfigError(where, problem=f"the shard indexes cover only the first {covered} of {numel} elements{what}",
                          remedy="use another checkpoint")
    return chosen


def _check_ranges(where: str, shape: tuple[int, ...], parts: list[Part]) -> None:
    """Raise ConfigError unless the parts together have all indexes of the dimension in which they differ."""
    dim = parts[0].dim
    if any(part.dim != dim for part in parts):
        raise ConfigError(where, problem="the shard indexes divide it in several dimensions",
                          remedy="use another checkpoint")
    covered = 0
    for start, stop in sorted(each for part in parts for each in part.ranges):
        if start > covered:
            break
        covered = max(covered, stop)
    if covered != shape[dim]:
        raise ConfigError(where, problem=f"the shard indexes have only the first {covered} of {shape[dim]} indexes of "
                          f"dimension {dim}", remedy="use another checkpoint")


@runtime_checkable
class WithBuffers(Protocol):
    """A layer with buffers that belong to the model's state, such as the biases by which routers balance experts.

    No optimizer changes them. They are small, so that every model-states file of a checkpoint has all of them.
    """

    def persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them by their names in this layer."""


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent floating-point buffers of this rank's layers, by name."""
    return {f"{prefix}.{name}": buffer for prefix, layer in module.named_modules() if isinstance(layer, WithBuffers)
            for name, buffer in layer.persistent_buffers()}
