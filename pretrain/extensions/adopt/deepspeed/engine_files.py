"""Open the files that a plain DeepSpeed engine has saved, and check that they belong together.

At ZeRO stage 3, fp32 weights and optimizer states that were swapped out to NVMe are in files of `SwappedFiles`. A
checkpoint has a copy of them in `offloaded_tensors/rankNN/`: `FIRST_LAST.tensor.swp` has the weights of a sub-group,
and `STATE-FIRST_LAST.tensor.swp` a state of them, as raw fp32 numbers with padding at the end (DeepSpeed 0.19.8:
runtime/swap_tensor/optimizer_utils.py). FIRST and LAST are numbers of the sub-group's first and last parameter. The
numbers increase in the order in which the model has made its parameters, but are recorded nowhere.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.fragments import FileLocation
from pretrain.checkpoint.format.shard_index import FP32
from pretrain.errors import ConfigError, counted
from pretrain.extensions.adopt.mapping import load_foreign_pickle

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_EXPERT_FILE = re.compile(r"(?:expp_rank_\d+_mp_rank_\d+_optim_states|"
                          r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states)\.pt")
OPTIMIZER = "optimizer_state_dict"  # key of a rank's state; at ZeRO stage 3 also of the base optimizer's in it
SAME_CHECKPOINT = "use the files of one checkpoint"
Shape = tuple[int, ...]
SUFFIX = ".swp"
_BYTES = 4  # bytes of an fp32 number
_WEIGHTS = re.compile(r"(\d+)_(\d+)\.tensor\.swp")


@dataclass
class EngineFiles:
    """The files of one checkpoint, memory-mapped."""

    folder: Path
    model: dict[str, Any]  # content of the first rank's model-states file
    model_files: tuple[str, ...]  # by rank; one file for all ranks below ZeRO stage 3
    optimizer_files: tuple[str, ...]  # by rank; none at ZeRO stage 0
    contents: dict[str, Any]  # file -> its content
    stage: int = 0  # ZeRO stage

    def optimizer(self, rank: int = 0) -> dict[str, Any]:
        """Return the state of a rank's optimizer wrapper."""
        found: dict[str, Any] = self.contents[self.optimizer_files[rank]][OPTIMIZER]
        return found

    @property
    def first_optimizer(self) -> dict[str, Any] | None:
        """The state of the first rank's optimizer, or of the optimizer itself; None: there is none."""
        return self.optimizer() if self.optimizer_files else self.model["optimizer"]


def open_files(folder: Path) -> EngineFiles:
    """Map all files of an engine's checkpoint. Raises ConfigError if one is missing, damaged or of another kind."""
    names = sorted(path.name for path in folder.iterdir())
    if experts := [name for name in names if _EXPERT_FILE.fullmatch(name)]:
        raise ConfigError(str(folder / experts[0]), problem="checkpoints with expert parallelism are not read",
                          remedy="import the weights alone, from a folder of transformers")
    models = {int(found[1] or 0): name for name in names if (found := _MODEL_FILE.fullmatch(name))}
    optimizers = {int(found[1]): name for name in names if (found := _OPTIMIZER_FILE.fullmatch(name))}
    divided = [name for name in names if (found := _MODEL_FILE.fullmatch(name) or _OPTIMIZER_FILE.fullmatch(name))
               and int(found[2]) > 0]
    if divided:
        raise ConfigError(str(folder / divided[0]), problem="it is one of several tensor-parallel parts",
                          remedy="such parts are read only next to files layer_XX-model_YY-model_states.pt")
    if not models:
        raise ConfigError(str(folder), problem="there is no file *model_states.pt of a DeepSpeed engine",
                          remedy="name the folder that engine.save_checkpoint wrote")
    _check_ranks(folder, [*models], "model_states.pt")
    contents: dict[str, Any] = {name: load_foreign_pickle(folder / name, mmap=True) for name in
                                (*models.values(), *optimizers.values())}
    opened = EngineFiles(folder, contents[models[0]], tuple(models[rank] for rank in sorted(models)),
                        tuple(optimizers[rank] for rank in sorted(optimizers)), contents)
    _check_contents(opened, [*optimizers])
    return opened


def _check_ranks(folder: Path, ranks: list[int], ending: str, expected: int | None = None) -> None:
    count = max(max(ranks, default=-1) + 1, expected or 0)
    if missing := sorted(set(range(count)) - set(ranks)):
        raise ConfigError(str(folder), problem=f"the file *_rank_{missing[0]}_*{ending} of rank {missing[0]} is missing"
                          + (f", and those of {counted(len(missing) - 1, 'other rank')}" if len(missing) > 1 else ""),
                          remedy="copy the files of all ranks into this folder")
    if expected is not None and count > expected:
        raise ConfigError(str(folder), problem=f"it has files of {count} ranks, and the checkpoint is of {expected}",
                          remedy="remove the files of another checkpoint")


def _check_contents(files: EngineFiles, ranks: list[int]) -> None:
    """Raise ConfigError unless the files have the keys that are read, and belong to one run of one number of ranks."""
    for name in files.model_files:
        for key in ("module", "global_steps", "dp_world_size"):
            value_at(files, name, key)
    world, is_zero = int(files.model["dp_world_size"]), files.model.get("param_shapes") is not None
    if is_zero or ranks:
        _check_ranks(files.folder, ranks, "optim_states.pt", world)
        partitions = {_plain(files.optimizer(rank).get("zero_stage")) for rank in range(world)
                      if value_at(files, files.optimizer_files[rank], OPTIMIZER)}
        if len(partitions) != 1 or not is_zero:
            raise ConfigError(str(files.folder), problem="its files are of several runs, with different ZeRO stages",
                              remedy=SAME_CHECKPOINT)
        stage = partitions.pop()
        files.stage = 1 if stage is None else int(stage)  # BF16_Optimizer records none
        for rank in range(world):
            counts = files.optimizer(rank).get("partition_count")
            found = set(counts if isinstance(counts, (list, tuple)) else [counts])
            if found != {world}:
                raise ConfigError(str(files.folder / files.optimizer_files[rank]), found=f"partition_count {counts}",
                                  expected=f"{world}, the number of ranks in {files.model_files[0]}",
                                  remedy=SAME_CHECKPOINT)
    if files.stage == 3:
        _check_ranks(files.folder, [*range(len(files.model_files))], "model_states.pt", world)
    steps = {files.contents[name]["global_steps"] for name in files.model_files}
    if len(steps) > 1:
        raise ConfigError(str(files.folder), problem=f"its files are of several steps: {', '.join(map(str, steps))}",
                          remedy=SAME_CHECKPOINT)


def _plain(value: Any) -> Any:
    """Return the plain number of an enum member."""
    return getattr(value, "value", value)


def value_at(files: EngineFiles, file: str, *keys: str | int) -> Any:
    """Return `content[keys[0]][keys[1]] ...` of a file. Raises ConfigError if it is not there."""
    value = files.contents[file]
    try:
        for key in keys:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        raise ConfigError(str(files.folder / file), problem=f"there is nothing at {list(keys)}, where DeepSpeed writes "
                          "its states", remedy="use a checkpoint that engine.save_checkpoint wrote") from None
    return value


def module_tensors(files: EngineFiles) -> dict[str, torch.Tensor]:
    """Return the parameters of the engine's module in the module's order: no buffers, no second names of a tensor."""
    buffers, shared = set(files.model.get("buffer_names") or ()), files.model.get("shared_params") or {}
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in files.model["module"].items():
        if name in buffers or name in shared or not torch.is_tensor(tensor):
            continue
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if files.stage == 3 or tensor.numel() == 0 or place not in seen:
            found[name] = tensor
            seen.add(place)
    return found


def param_shapes(files: EngineFiles) -> list[dict[str, Shape]]:
    """Return the names and shapes of each group (at stage 3: sub-group), in the order of the flat tensors."""
    recorded = files.model["param_shapes"]
    groups = recorded if isinstance(recorded, list) else [recorded]
    if not all(isinstance(group, dict) for group in groups):
        raise ConfigError(str(files.folder / files.model_files[0]), problem="param_shapes is not a list of names and "
                          "shapes", remedy="use a checkpoint that engine.save_checkpoint wrote")
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def base_state(files: EngineFiles, rank: int) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Return the state_dict of the optimizer inside a rank's wrapper, or its states alone by group (elastic)."""
    optimizer = files.optimizer(rank)
    found: dict[str, Any] | list[dict[str, Any]] | None = optimizer.get(
        OPTIMIZER if files.stage == 3 else "base_optimizer_state")
    return found


def param_groups(files: EngineFiles) -> list[dict[str, Any]]:
    """Return the settings of the base optimizer's parameter groups; none if the checkpoint has no optimizer."""
    if files.optimizer_files:
        state: Any = base_state(files, 0)
    else:
        state = files.model["optimizer"] or {}
        state = state.get(OPTIMIZER, state)
    return list(state["param_groups"]) if isinstance(state, dict) and "param_groups" in state else []


@dataclass(frozen=True)
class SwappedFiles:
    """The swapped tensors of one rank."""

    folder: Path  # folder of the checkpoint
    rank_folder: Path
    ids: Mapping[int, str]  # sub-group -> FIRST_LAST

    @classmethod
    def find(cls, folder: Path, rank: int, groups: Sequence[dict[str, Any]], order: list[str]) -> "SwappedFiles":
        """Match the files of a rank with the sub-groups. Raises ConfigError if they do not fit in the model's order.

        Args:
            groups: parameters of each sub-group, by name.
            order: names in the order of the model.
        """
        rank_folder = folder / "offloaded_tensors" / f"rank{rank:02d}"
        found = sorted((int(match[1]), int(match[2])) for path in rank_folder.glob("*.tensor.swp")
                       if (match := _WEIGHTS.fullmatch(path.name))) if rank_folder.is_dir() else []
        position = {name: index for index, name in enumerate(order)}
        ends = [(position[next(iter(group))], position[next(reversed(group))]) for group in groups]
        return cls(folder, rank_folder, _matched(rank_folder, found, ends))

    def locations(self, group: int, numel: int, states: Iterable[str]) -> dict[str, FileLocation]:
        """Return where weights and states of a sub-group lie. Raises ConfigError for missing or short files."""
        if group not in self.ids:
            raise ConfigError(str(self.rank_folder), problem=f"it has no file with the weights of sub-group {group}, "
                              "which were on NVMe", remedy="copy the folder offloaded_tensors of the checkpoint")
        found = {}
        for state in (FP32, *states):
            path = self.rank_folder / f"{'' if state == FP32 else state + '-'}{self.ids[group]}.tensor{SUFFIX}"
            size = path.stat().st_size if path.is_file() else -1
            if size < numel * _BYTES:
                problem = "it is missing" if size < 0 else f"it has {size} bytes, and {numel * _BYTES} are needed"
                raise ConfigError(str(path), problem=problem,
                                  remedy="copy the folder offloaded_tensors of the checkpoint")
            found[state] = FileLocation(str(path.relative_to(self.folder)), ())
        return found


def _matched(where: Path, found: list[tuple[int, int]], ends: list[tuple[int, int]]) -> dict[int, str]:
    """Return the numbers FIRST_LAST of each sub-group that has files: small sub-groups are not swapped.

    The numbers of a model's parameters begin at any number, and then count up in the model's order.
    """
    if not found:
        return {}
    fitting = []
    for first, last in ends:
        begin = found[0][0] - first
        groups = {(first + begin, last + begin): index for index, (first, last) in enumerate(ends)}
        if found[0][1] == last + begin and all(pair in groups for pair in found):
            fitting.append({groups[pair]: f"{pair[0]}_{pair[1]}" for pair in found})
    if len(fitting) == 1:
        return fitting[0]
    raise ConfigError(str(where), problem=f"the numbers in the names of its {len(found)} files fit the {len(ends)} "
                      f"sub-groups in {len(fitting)} ways",
                      remedy="continue the run for a step without NVMe offload, and import its next checkpoint")


def map_numbers(path: Path) -> torch.Tensor:
    """Return the content of a swapped file, memory-mapped."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size // _BYTES, dtype=torch.float32)
