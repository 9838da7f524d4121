"""Read full parameters from a checkpoint of any layout: weights and optimizer states by name, piece by piece."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.fragments import FileLocation
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.errors import ConfigError

_PIECE_NUMEL = 2**24  # elements
FP32 = "fp32"  # name of the master weights among the optimizer's states
SCHEDULED = ("lr", "initial_lr", "betas", "momentum")  # settings of a parameter group that schedules change
# DeepSpeed's optimizers have the same states as torch's of these names ...
_FAMILIES = {"FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam", "AdamW": "Adam", "FusedLion": "Lion",
             "DeepSpeedCPULion": "Lion", "DeepSpeedCPUAdagrad": "Adagrad"}
# ... except for these, which have another name or (None) are never used
_RENAMED_STATES: dict[str, dict[str, str | None]] = {
    "DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}, "DeepSpeedCPULion": {"exp_avg_sq": None}}


def optimizer_family(class_name: str) -> str:
    """Return one name for the fused, the CPU and torch's implementation of an optimizer."""
    return _FAMILIES.get(class_name, class_name)


def state_name(class_name: str, key: str) -> str | None:
    """Return the family's name of an optimizer's state; None: the state has no effect."""
    return _RENAMED_STATES.get(class_name, {}).get(key, key)


@dataclass(frozen=True)
class _FlatTensor:
    """Locations of one flat tensor and its optimizer states, and the settings of its parameter group."""

    weights: FileLocation
    states: dict[str, FileLocation]
    group: dict[str, Any]


@dataclass(frozen=True)
class _Piece:
    """A contiguous piece of a parameter in a flat tensor. All numbers count elements."""

    start: int
    length: int
    offset: int
    tensor: _FlatTensor


def pieces_of(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of consecutive pieces of a tensor with `numel` elements, small enough for memory."""
    for start in range(0, numel, _PIECE_NUMEL):
        yield start, min(_PIECE_NUMEL, numel - start)


class CheckpointReader:
    """Reads the shard indexes at once, and memory-maps a file when a tensor in it is needed. Needs no process group.

    Attributes:
        shapes: shape of each parameter, by name.
        states: "fp32" and the optimizer states with a number for each weight; "fp32" alone before the first step.
        scalars: optimizer states that are one number ("step" ...).
        optimizer: class name of the base optimizer.

    Raises ConfigError if an index is missing or the indexes do not cover a parameter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.scalars: dict[str, float] = {}
        self.optimizer = ""
        self._pieces: dict[str, list[_Piece]] = {}
        self._files: dict[str, Any] = {}
        self._flat: dict[FileLocation, torch.Tensor] = {}
        names: dict[str, None] = {}
        for path in sorted(folder.glob("shard_index_rank_*.json")):
            names |= dict.fromkeys(self._add_index(path))
        if not self._pieces:
            raise ConfigError(str(folder), problem="there is no shard_index_rank_*.json with weights",
                              remedy="name a checkpoint that this program wrote")
        self.states = [FP32, *names]
        for name, shape in self.shapes.items():
            self._pieces[name] = self._covering(name, prod(shape))
        self._starts = {name: [piece.start for piece in pieces] for name, pieces in self._pieces.items()}

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
                              remedy="the checkpoint is damaged") from None
        return found

    def _add_tensor(self, entry: dict[str, Any], groups: list[dict[str, Any]]) -> list[str]:
        weights, states = (FileLocation(entry[key][0], tuple(entry[key][1])) for key in ("weights", "states"))
        named = {name: states.at(key) for key in entry["elementwise"]
                 if (name := state_name(self.optimizer, key)) is not None}
        tensor = _FlatTensor(weights, named, groups[entry["group"]])
        # FusedAdam counts the steps of a parameter group only on its last parameter, so the largest count is right
        if entry["scalars"].get("step", 0) >= self.scalars.get("step", 0):
            self.scalars |= entry["scalars"]
        for name, shape, start, length, offset in entry["fragments"]:
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(f"{name} has the shapes {shape} and {list(self.shapes[name])}")
            self._pieces.setdefault(name, []).append(_Piece(start, length, offset, tensor))
        return list(named)

    def _covering(self, name: str, numel: int) -> list[_Piece]:
        """Return the pieces in order, without the second copy of a weight that two pipeline stages share."""
        covered, chosen = 0, []
        for piece in sorted(self._pieces[name], key=lambda piece: piece.start):
            if piece.start > covered:
                break
            if piece.start + piece.length > covered:
                chosen.append(piece)
                covered = piece.start + piece.length
        if covered != numel:
            raise ConfigError(f"{self.folder}: {name}", problem=f"the shard indexes cover only the first {covered} of "
                              f"{numel} elements", remedy="the checkpoint is incomplete")
        return chosen

    def group(self, name: str) -> dict[str, Any]:
        """Return the settings (lr, betas ...) of the parameter group that a parameter was in."""
        return self._pieces[name][0].tensor.group

    def copy(self, name: str, state: str, start: int, out: torch.Tensor) -> None:
        """Fill `out`, on any device and of any floating dtype, with the state's elements from `start` on."""
        out = out.view(-1)
        done, pieces = 0, self._pieces[name]
        index = bisect_right(self._starts[name], start) - 1
        while done < out.numel():
            piece = pieces[index]
            skip = start + done - piece.start
            count = min(piece.length - skip, out.numel() - done)
            source = self._open(name, state, piece).narrow(0, piece.offset + skip, count)
            out.narrow(0, done, count).copy_(source)
            done, index = done + count, index + 1

    def read(self, name: str, state: str, start: int, length: int) -> torch.Tensor:
        """Return elements `start` to `start + length` of a state as an fp32 tensor on the CPU."""
        out = torch.empty(length)
        self.copy(name, state, start, out)
        return out

    def tensor(self, name: str, state: str = FP32) -> torch.Tensor:
        """Return a full state as an fp32 tensor on the CPU, in the parameter's shape."""
        return self.read(name, state, 0, prod(self.shapes[name])).view(self.shapes[name])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a state_dict for `as_module(config)` in fp32: the master weights or, in fp32 training, the weights."""
        return {name: self.tensor(name) for name in self.shapes}

    def _open(self, name: str, state: str, piece: _Piece) -> torch.Tensor:
        """Return the memory-mapped flat tensor of a piece."""
        location = piece.tensor.weights if state == FP32 else piece.tensor.states.get(state)
        if location is None:
            raise ConfigError(f"{self.folder}: {name}", problem=f"the optimizer state {state} is missing, which other "
                              "parameters have", remedy="the checkpoint is damaged")
        if location not in self._flat:
            value = self._load(location.file)
            try:
                for key in location.keys:
                    value = value[key]
                self._flat[location] = value.detach().reshape(-1)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self.folder / location.file}", problem=f"there is no tensor at {location.keys} "
                                  f"({type(error).__name__}: {error})", remedy="the checkpoint is damaged") from None
        found, needed = self._flat[location].numel(), piece.offset + piece.length
        if found < needed:
            raise ConfigError(f"{self.folder / location.file}", found=f"{found} elements at {location.keys}",
                              expected=f"at least {needed}", remedy="the checkpoint is damaged")
        return self._flat[location]

    def _load(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = load_pickle(self.folder / file, mmap=True)
        return self._files[file]

    def engine_state(self) -> dict[str, Any]:
        """Return what DeepSpeed saves besides tensors: global_steps, global_samples, skipped_steps, lr_scheduler ..."""
        names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
        name = next((name for name in names if (self.folder / name).is_file()), names[0])
        state: dict[str, Any] = self._load(name)
        return state
