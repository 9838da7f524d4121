"""Read weights and optimizer states by parameter name from a checkpoint of any layout."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pretrain.checkpoint.format.fragments import FileLocation
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.checkpoint.format.safetensors_header import read_header
from pretrain.errors import ConfigError

_CHUNK_NUMEL = 2**24  # largest number of elements in a chunk
FP32 = "fp32"  # name under which the master weights are listed with the optimizer states
# settings of a parameter group that learning-rate schedulers change
SCHEDULED_SETTINGS = ("lr", "initial_lr", "betas", "momentum")
# class name of an optimizer -> name of its family; optimizers of one family have the same states
_FAMILIES = {"FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam", "AdamW": "Adam", "FusedLion": "Lion",
             "DeepSpeedCPULion": "Lion", "DeepSpeedCPUAdagrad": "Adagrad"}
# class name -> its name of a state -> the family's name; None: the class stores this state but never uses it
_RENAMED_STATES: dict[str, dict[str, str | None]] = {
    "DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}, "DeepSpeedCPULion": {"exp_avg_sq": None}}


def optimizer_family(class_name: str) -> str:
    """Return the family of an optimizer class: one name for its fused, CPU and torch implementations."""
    return _FAMILIES.get(class_name, class_name)


def state_name(class_name: str, key: str) -> str | None:
    """Return the family's name of the state `key` of an optimizer class; None if the class never uses the state."""
    return _RENAMED_STATES.get(class_name, {}).get(key, key)


@dataclass(frozen=True)
class _StoredTensor:
    """A flat tensor in the checkpoint's files: its location, optimizer states and parameter-group settings."""

    weights: FileLocation
    states: dict[str, FileLocation]  # by the family's name
    group: dict[str, Any]  # settings of the parameter group (lr, betas ...)


@dataclass(frozen=True)
class _StoredFragment:
    """A contiguous part of a parameter in a stored flat tensor. All numbers count elements."""

    start: int  # index of the first element in the flattened parameter
    length: int
    offset: int  # index of the first element in the flat tensor
    tensor: _StoredTensor


class SafetensorsFile:
    """A memory-mapped safetensors file. `file[name]` is a tensor that shares the mapped memory: do not change it."""

    def __init__(self, path: Path) -> None:
        self.names = read_header(path)  # raises ConfigError
        self._file = safe_open(path, framework="pt")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


def chunks_of(numel: int, chunk_numel: int = _CHUNK_NUMEL) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of consecutive chunks of a tensor with `numel` elements, each small enough for memory."""
    for start in range(0, numel, chunk_numel):
        yield start, min(chunk_numel, numel - start)


class CheckpointReader:
    """Gives access to the tensors of a checkpoint, without a process group.

    The constructor reads all shard indexes. A tensor's file is memory-mapped when the tensor is first needed.

    Attributes:
        shapes: shape of each parameter, by name.
        states: "fp32", and the names of the optimizer states that have a number for each weight. Before the first step
            there is only "fp32", and in a checkpoint of imported weights.
        scalars: optimizer states that are a single number ("step" ...).
        optimizer: class name of the base optimizer.

    Raises ConfigError if an index is missing or the indexes do not cover a parameter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.scalars: dict[str, float] = {}
        self.optimizer = ""
        self._fragments: dict[str, list[_StoredFragment]] = {}
        self._files: dict[str, Any] = {}
        self._flat_tensors: dict[FileLocation, torch.Tensor] = {}
        names: dict[str, None] = {}
        for path in sorted(folder.glob("shard_index_rank_*.json")):
            names |= dict.fromkeys(self._add_index(path))
        if not self._fragments:
            raise ConfigError(str(folder), problem="there is no shard_index_rank_*.json with weights",
                              remedy="use a checkpoint that this program wrote")
        self.states = [FP32, *names]
        for name, shape in self.shapes.items():
            self._fragments[name] = self._without_copies(name, prod(shape))
        self._starts = {name: [fragment.start for fragment in fragments]
                        for name, fragments in self._fragments.items()}

    def _add_index(self, path: Path) -> list[str]:
        """Read one rank's index and return the names of the optimizer states in it."""
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            self.optimizer = index["optimizer"]
            found: list[str] = []
            for entry in index["tensors"]:
                states = self._add_tensor(entry, index["groups"])
                found += states
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(str(path), problem=f"the shard index cannot be read: {type(error).__name__} ({error})",
                              remedy="use another checkpoint") from None
        return found

    def _add_tensor(self, entry: dict[str, Any], groups: list[dict[str, Any]]) -> list[str]:
        """Add one entry of a shard index, and return the names of its elementwise optimizer states."""
        weights, states = (FileLocation(entry[key][0], tuple(entry[key][1])) for key in ("weights", "states"))
        named = {name: states.at(key) for key in entry["elementwise"]
                 if (name := state_name(self.optimizer, key)) is not None}
        tensor = _StoredTensor(weights, named, groups[entry["group"]])
        # FusedAdam updates the step count of only the last parameter in a group, so the largest count is right
        if entry["scalars"].get("step", 0) >= self.scalars.get("step", 0):
            self.scalars |= entry["scalars"]
        for name, shape, start, length, offset in entry["fragments"]:
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(f"{name} has the shapes {shape} and {list(self.shapes[name])}")
            self._fragments.setdefault(name, []).append(_StoredFragment(start, length, offset, tensor))
        return list(named)

    def _without_copies(self, name: str, numel: int) -> list[_StoredFragment]:
        """Return a parameter's fragments in order, and only one copy of a weight that two pipeline stages share.

        Raises ConfigError if an element is in no fragment.
        """
        covered, chosen = 0, []
        for fragment in sorted(self._fragments[name], key=lambda fragment: fragment.start):
            if fragment.start > covered:
                break
            if fragment.start + fragment.length > covered:
                chosen.append(fragment)
                covered = fragment.start + fragment.length
        if covered != numel:
            raise ConfigError(f"{self.folder}: {name}", problem=f"the shard indexes cover only the first {covered} of "
                              f"{numel} elements", remedy="use another checkpoint")
        return chosen

    def group(self, name: str) -> dict[str, Any]:
        """Return the settings (lr, betas ...) of a parameter's group."""
        return self._fragments[name][0].tensor.group

    def copy(self, name: str, state: str, start: int, out: torch.Tensor) -> None:
        """Copy consecutive elements of a state into `out`, beginning with element `start`, until `out` is full.

        `out` may be on any device and of any floating dtype.
        """
        out = out.view(-1)
        done, fragments = 0, self._fragments[name]
        index = bisect_right(self._starts[name], start) - 1
        while done < out.numel():
            fragment = fragments[index]
            skip = start + done - fragment.start
            count = min(fragment.length - skip, out.numel() - done)
            source = self._flat_tensor(name, state, fragment).narrow(0, fragment.offset + skip, count)
            out.narrow(0, done, count).copy_(source)
            done, index = done + count, index + 1

    def read(self, name: str, state: str, start: int, length: int) -> torch.Tensor:
        """Return elements `start` to `start + length` of a state as an fp32 tensor on the CPU."""
        out = torch.empty(length)
        self.copy(name, state, start, out)
        return out

    def tensor(self, name: str, state: str = FP32) -> torch.Tensor:
        """Return the state of a full parameter as an fp32 tensor on the CPU, in the parameter's shape."""
        return self.read(name, state, 0, prod(self.shapes[name])).view(self.shapes[name])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the fp32 weights of all parameters, as a state_dict for the module of `layer_specs.as_module`."""
        return {name: self.tensor(name) for name in self.shapes}

    def _flat_tensor(self, name: str, state: str, fragment: _StoredFragment) -> torch.Tensor:
        """Return the memory-mapped flat tensor that holds a fragment's state."""
        location = fragment.tensor.weights if state == FP32 else fragment.tensor.states.get(state)
        if location is None:
            raise ConfigError(f"{self.folder}: {name}", problem=f"the optimizer state {state} is missing; other "
                              "parameters have it", remedy="use another checkpoint")
        if location not in self._flat_tensors:
            value = self._load_file(location.file)
            try:
                for key in location.keys:
                    value = value[key]
                self._flat_tensors[location] = value.detach().reshape(-1)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self.folder / location.file}", problem=f"there is no tensor at {location.keys} "
                                  f"({type(error).__name__}: {error})", remedy="use another checkpoint") from None
        found, needed = self._flat_tensors[location].numel(), fragment.offset + fragment.length
        if found < needed:
            raise ConfigError(f"{self.folder / location.file}", found=f"{found} elements at {location.keys}",
                              expected=f"at least {needed}", remedy="use another checkpoint")
        return self._flat_tensors[location]

    def _load_file(self, file: str) -> Any:
        """Return the content of a file; it is loaded only once."""
        if file not in self._files:
            path = self.folder / file
            self._files[file] = SafetensorsFile(path) if path.suffix == ".safetensors" else load_pickle(path, mmap=True)
        return self._files[file]

    def engine_state(self) -> dict[str, Any]:
        """Return the content of rank 0's model-states file: global_steps, lr_scheduler, ds_config and others."""
        names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
        name = next((name for name in names if (self.folder / name).is_file()), names[0])
        state: dict[str, Any] = self._load_file(name)
        return state
