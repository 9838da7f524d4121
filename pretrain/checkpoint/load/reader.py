"""A checkpoint of any layout as whole parameters: weights and optimizer states by name, read piece by piece."""

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
FP32 = "fp32"  # the master weights, beside the optimizer's own states
SCHEDULED = ("lr", "initial_lr", "betas", "momentum")  # what schedules change in a parameter group
# DeepSpeed's own optimizers, which keep what torch's do; and the states that they name otherwise (None: never used)
_SAME_AS = {"FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam", "AdamW": "Adam", "FusedLion": "Lion",
            "DeepSpeedCPULion": "Lion", "DeepSpeedCPUAdagrad": "Adagrad"}
_RENAMED: dict[str, dict[str, str | None]] = {
    "DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}, "DeepSpeedCPULion": {"exp_avg_sq": None}}


def optimizer_kind(class_name: str) -> str:
    """The same word for the fused, the host's and torch's implementation of an optimizer."""
    return _SAME_AS.get(class_name, class_name)


def state_name(class_name: str, key: str) -> str | None:
    """What an optimizer's state is called here; None: it has no effect."""
    return _RENAMED.get(class_name, {}).get(key, key)


@dataclass(frozen=True)
class _Tensor:
    """A flat tensor in the files."""

    weights: FileLocation
    states: dict[str, FileLocation]
    group: dict[str, Any]


@dataclass(frozen=True)
class _Piece:
    """A stretch of a parameter in a flat tensor; numbers count elements."""

    start: int
    length: int
    offset: int
    tensor: _Tensor


def pieces_of(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of consecutive pieces of a tensor with `numel` elements, small enough for memory."""
    for start in range(0, numel, _PIECE_NUMEL):
        yield start, min(_PIECE_NUMEL, numel - start)


class CheckpointReader:
    """Opens the indexes at once, and a file when something in it is asked for (memory-mapped). One process is enough.

    Attributes:
        shapes: of each parameter, by name.
        states: "fp32" and the states that the optimizer keeps for each weight; "fp32" alone before the first step.
        scalars: those that it keeps once ("step" ...).
        optimizer: class of the base optimizer.

    Raises ConfigError where an index is missing or does not cover a parameter.
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
            raise ConfigError(str(folder), found="no shard_index_rank_*.json with weights",
                              expected="a checkpoint that this program wrote")
        self.states = [FP32, *names]
        for name, shape in self.shapes.items():
            self._pieces[name] = self._covering(name, prod(shape))
        self._starts = {name: [piece.start for piece in pieces] for name, pieces in self._pieces.items()}

    def _add_index(self, path: Path) -> list[str]:
        """The names of the states in it."""
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            self.optimizer = index["optimizer"]
            found: list[str] = []
            for entry in index["tensors"]:
                states = self._add_tensor(entry, index["groups"])
                found += states
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(str(path), found=f"{type(error).__name__} ({error})",
                              expected="an index of this rank's files", remedy="the checkpoint is damaged") from None
        return found

    def _add_tensor(self, entry: dict[str, Any], groups: list[dict[str, Any]]) -> list[str]:
        weights, states = (FileLocation(entry[key][0], tuple(entry[key][1])) for key in ("weights", "states"))
        named = {name: states.at(key) for key in entry["elementwise"]
                 if (name := state_name(self.optimizer, key)) is not None}
        tensor = _Tensor(weights, named, groups[entry["group"]])
        # FusedAdam counts the steps of a parameter group on the last of its parameters alone
        if entry["scalars"].get("step", 0) >= self.scalars.get("step", 0):
            self.scalars |= entry["scalars"]
        for name, shape, start, length, offset in entry["fragments"]:
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(f"{name} has the shapes {shape} and {list(self.shapes[name])}")
            self._pieces.setdefault(name, []).append(_Piece(start, length, offset, tensor))
        return list(named)

    def _covering(self, name: str, numel: int) -> list[_Piece]:
        """Pieces in order, without second copies (of a weight that two pipeline stages share)."""
        covered, chosen = 0, []
        for piece in sorted(self._pieces[name], key=lambda piece: piece.start):
            if piece.start > covered:
                break
            if piece.start + piece.length > covered:
                chosen.append(piece)
                covered = piece.start + piece.length
        if covered != numel:
            raise ConfigError(f"{self.folder}: {name}", found=f"elements 0 to {covered} in the shard indexes",
                              expected=f"all {numel}", remedy="the checkpoint is not whole")
        return chosen

    def group(self, name: str) -> dict[str, Any]:
        """The settings (lr, betas ...) of the parameter group that a parameter was in."""
        return self._pieces[name][0].tensor.group

    def copy(self, name: str, state: str, start: int, out: torch.Tensor) -> None:
        """Fill `out`, of any device and floating dtype, with the state's elements from `start` on."""
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
        """fp32 on the host, [length]."""
        out = torch.empty(length)
        self.copy(name, state, start, out)
        return out

    def tensor(self, name: str, state: str = FP32) -> torch.Tensor:
        """fp32 on the host, in the parameter's shape."""
        return self.read(name, state, 0, prod(self.shapes[name])).view(self.shapes[name])

    def weights(self) -> dict[str, torch.Tensor]:
        """state_dict of `as_module(config)` in fp32: the master weights, where there are such."""
        return {name: self.tensor(name) for name in self.shapes}

    def _open(self, name: str, state: str, piece: _Piece) -> torch.Tensor:
        """The flat tensor of a piece, on the disk until it is used."""
        place = piece.tensor.weights if state == FP32 else piece.tensor.states.get(state)
        if place is None:
            raise ConfigError(f"{self.folder}: {name}", found=f"no {state}", expected="one, as other parameters have")
        if place not in self._flat:
            value = self._load(place.file)
            try:
                for key in place.keys:
                    value = value[key]
                self._flat[place] = value.detach().reshape(-1)
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self.folder / place.file}", found=f"{type(error).__name__} ({error})",
                                  expected=f"a tensor at {place.keys}", remedy="the checkpoint is damaged") from None
        found, needed = self._flat[place].numel(), piece.offset + piece.length
        if found < needed:
            raise ConfigError(f"{self.folder / place.file}", found=f"{found} elements at {place.keys}",
                              expected=f"at least {needed}", remedy="the checkpoint is damaged")
        return self._flat[place]

    def _load(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = load_pickle(self.folder / file, mmap=True)
        return self._files[file]

    def close(self) -> None:
        """Let the files go; they are opened again when they are needed."""
        self._files.clear()
        self._flat.clear()

    def engine_state(self) -> dict[str, Any]:
        """What DeepSpeed saves beside tensors: global_steps, global_samples, skipped_steps, lr_scheduler ..."""
        names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
        name = next((name for name in names if (self.folder / name).is_file()), names[0])
        state: dict[str, Any] = self._load(name)
        return state
