"""Find what another program has written in a folder, by the names of the files. Imports no torch."""

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.config.ds_json.read import get_value
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.foreign_run import ForeignRun, as_data, understood
from pretrain.stored_json import read_object, read_text

_HERE = __name__.rpartition(".")[0]
_NUMBERED = re.compile(r"(?:global_step|checkpoint-|checkpoint_|step-|step_|iter_)0*(\d+)(?:_universal)?")
# files in which a program names its newest checkpoint
_LATEST = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
_LONGEST_NAME, _LARGEST_NAME_FILE = 255, 4096
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # torch/distributed/checkpoint/_hf_utils.py


@dataclass(frozen=True)
class SourceKind:
    """A kind of checkpoint folder, and the module whose `read(folder, config)` returns its ForeignRun.

    `config` is the content of a transformers config.json: of --model, or of a file in the folder or next to it. With
    None, the source itself must describe its model, or `read` raises a ConfigError for --model.
    """

    name: str  # shown in messages
    module: str  # in this package
    matches: Callable[[set[str]], bool]  # by the names in the folder

    def read(self, folder: Path, config: dict[str, Any] | None) -> ForeignRun:
        """Import the module, which imports torch, and read the checkpoint. Raises ConfigError."""
        with understood(folder):
            return as_data(importlib.import_module(f"{_HERE}.{self.module}").read(folder, config))


@dataclass(frozen=True)
class Source:
    """A checkpoint folder of another program."""

    kind: SourceKind
    folder: Path
    config: dict[str, Any] | None  # see SourceKind

    def read(self) -> ForeignRun:
        """Return what the checkpoint holds. Raises ConfigError."""
        return self.kind.read(self.folder, self.config)


def _any(pattern: str) -> Callable[[set[str]], bool]:
    compiled = re.compile(pattern)
    return lambda names: any(map(compiled.fullmatch, names))


def _is_trainers(names: set[str]) -> bool:
    """Return whether a folder is a Trainer's own. In `export --format trainer`, the universal checkpoint is read."""
    return "trainer_state.json" in names and ("latest_universal" not in names or "latest" in names)


_has_layers = _any(r"layer_\d+-model_\d+-model_states\.pt")
_has_engine = _any(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
# The first row that matches is the kind of a folder. A row stands before another one whose files it has, too.
KINDS = (
    SourceKind("transformers.Trainer", "deepspeed.trainer", _is_trainers),
    SourceKind("DeepSpeed's universal format", "deepspeed.universal",
               lambda names: "zero" in names and _has_engine(names)),
    SourceKind("GPT-NeoX or Megatron-DeepSpeed", "megatron.layers",
               lambda names: _has_layers(names) or ("configs" in names and _has_engine(names))),
    SourceKind("a DeepSpeed engine", "deepspeed.zero_files", _has_engine),
    SourceKind("torch.distributed.checkpoint", "dcp", lambda names: ".metadata" in names),
)


def kind_of(folder: Path) -> SourceKind | None:
    """Return the kind of checkpoint that a folder is; None: it is none of KINDS."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return next((kind for kind in KINDS if kind.matches(names)), None)


def find_source(path: Path, *, step: int | None, config: dict[str, Any] | None) -> Source | None:
    """Return the checkpoint at `path`; None if `path` has none, but weights of transformers or nothing.

    `path` is the folder of a checkpoint, or a folder with several: then the one of `step` is taken, or without `step`
    the newest one. Raises ConfigError for a folder that this program wrote, and if there is no such step.
    """
    _reject_own(path)
    kind = kind_of(path)
    if kind is not None:
        _reject_special_files(path)
        return Source(kind, path, config or _config_near(path))
    found = [(child, kind) for child in _children(path) if (kind := kind_of(child)) is not None]
    if not found:
        _reject_shards(path)
        return None
    folder, kind = _chosen(path, found, step)
    _reject_special_files(folder)
    return Source(kind, folder, config or _config_near(folder))


def _reject_own(path: Path) -> None:
    if any((folder / MANIFEST).is_file() for folder in (path, *path.glob("global_step*"),
                                                        *path.glob("checkpoints/global_step*"))):
        raise ConfigError(str(path), problem="this program wrote these checkpoints", remedy="a run resumes from its "
                          f"own run folder (--save), and another run begins with them by --resume_from {path}")


def _reject_special_files(folder: Path) -> None:
    """Raise ConfigError for a pipe, a socket or a device, of which a program may read forever."""
    for path in sorted(folder.rglob("*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(str(path), problem="this is neither a file nor a folder", remedy="remove it")


def _reject_shards(path: Path) -> None:
    """Raise ConfigError for a checkpoint that torch's HuggingFaceStorageWriter wrote and did not consolidate."""
    for folder in (path, *(child for child in _children(path) if step_in_name(child) is not None)):
        if folder.is_dir() and any(_SHARD.fullmatch(file.name) for file in folder.iterdir()):
            raise ConfigError(str(folder), problem="shards that torch's HuggingFaceStorageWriter wrote are not read",
                              remedy="save the run with torch's FileSystemWriter, or save the weights with "
                              "enable_consolidation=True and import them alone")


def _children(path: Path) -> Iterable[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else ()


def _chosen(path: Path, found: list[tuple[Path, SourceKind]], step: int | None) -> tuple[Path, SourceKind]:
    """Return the folder of `step`, or the newest one."""
    numbered = [(number, child, kind) for child, kind in found if (number := step_in_name(child)) is not None]
    if step is not None and numbered:
        chosen = [(child, kind) for number, child, kind in numbered if number == step]
        if len(chosen) == 1:
            return chosen[0]
        problem = f"{path} has no checkpoint of this step" if not chosen else \
            f"{path} has {' and '.join(child.name for child, _ in chosen)}"
        steps = ", ".join(str(number) for number in sorted({number for number, _, _ in numbered}))
        remedy = "name the folder of one checkpoint" if chosen else f"it has those of the steps {steps}"
        raise ConfigError(f"--step {step}", problem=problem, remedy=remedy)
    latest = _latest_names(path)
    for child, kind in found:
        if child.name in latest:
            return child, kind
    if latest:
        steps = ", ".join(str(number) for number, _, _ in sorted(numbered, key=lambda each: each[0]))
        raise ConfigError(str(path), problem=f"the newest checkpoint is {shorten(min(latest))}, as a file there "
                          "says, and it is missing",
                          remedy=f"copy it, or select another one by --step ({steps})" if numbered else
                          "copy it, or name the folder of another one")
    if numbered:
        _, folder, kind = max(numbered, key=lambda each: each[0])
        return folder, kind
    if len(found) == 1:
        return found[0]
    raise ConfigError(str(path), problem=f"it has {len(found)} checkpoints without a number "
                      f"({shorten(', '.join(child.name for child, _ in found))})",
                      remedy="name the folder of one of them")


def step_in_name(folder: Path) -> int | None:
    """Return the number in a folder's name, such as 1000 in checkpoint-1000; None: the name has none."""
    found = _NUMBERED.fullmatch(folder.name)
    return int(found[1]) if found else None


def _latest_names(path: Path) -> set[str]:
    """Return the folders that the program itself names as its newest checkpoint."""
    names = set()
    for file in _LATEST:
        try:
            name = read_text(path / file, largest_bytes=_LARGEST_NAME_FILE)[:_LONGEST_NAME].strip()
        except (OSError, ValueError):
            continue
        names |= {name, f"iter_{int(name):07d}"} if name.isdecimal() else {name}
    return names - {""}


def _config_near(folder: Path) -> dict[str, Any] | None:
    """Return the transformers config.json in a checkpoint folder or next to it; None: there is none."""
    for path in (folder / "config.json", folder.parent / "config.json"):
        if path.is_file():
            try:
                values = read_object(path)
            except (OSError, ValueError) as error:
                raise ConfigError(str(path), problem=f"it cannot be read: {error}",
                                  remedy="name another config.json by --model") from None
            if get_value(values, "model_type") is not None:
                return values
    return None
