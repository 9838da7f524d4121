"""The files of a checkpoint that DeepSpeed writes for a pipeline with tensor parallelism, and their inventory.

DeepSpeed (runtime/pipe/module.py, ckpt_layer_path; runtime/engine.py, _get_ckpt_name) writes:

- `layer_LL-model_TT-model_states.pt`: part TT of the parameters of layer LL, under their names inside the layer;
- `mp_rank_MM_model_states.pt`: what else rank MM of a replica has. MM = pipeline stage * tensor-parallel degree + TT,
  because its topology has the axes pipe, data and model (runtime/pipe/topology.py, PipeModelDataParallelTopology);
- `zero_pp_rank_DD_mp_rank_MM_optim_states.pt`, with the prefix `bf16_` in bf16: the ZeRO partition of data-parallel
  rank DD.

Without a pipeline (GPT-NeoX with pipe_parallel_size 0), the file of mp rank TT has the parameters of all layers, under
names such as sequential.2.input_layernorm.weight.

The programs add values of their own to mp_rank files: arguments, and states of random number generators.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.mapping import load_foreign_pickle

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_MP_RANK = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")
_INCOMPLETE = "the checkpoint is incomplete: copy all its files, or name another checkpoint"


class Ignored:
    """Stand in for an object of a class of another program or of numpy, whose content is not needed."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class EnumValue:
    """Stand in for a member of an enumeration of Megatron, by its value or, from Python 3.11.0 to 3.11.3, its name."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def member_named(cls, name: str) -> "EnumValue":
        """Return what stands for `getattr(CLASS, NAME)`; see format/pickles.py."""
        return cls(name)


# Classes of the values that GPT-NeoX and Megatron-DeepSpeed add. Instances of the stand-ins hold no code, and creating
# an empty Namespace runs none.
_ALLOWED: tuple[Any, ...] = (
    argparse.Namespace,
    *((EnumValue, f"megatron.{module}.{name}") for module in ("enums", "core.enums", "model.enums")
      for name in ("ModelType", "PositionEmbeddingType", "AttnMaskType", "AttnType", "LayerType")),
    *((Ignored, name) for name in ("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct",
                                   "numpy._core.multiarray._reconstruct")),
)


@dataclass(frozen=True)
class LayerFiles:
    """The files of one checkpoint, complete."""

    folder: Path
    layers: Mapping[int, tuple[Path, ...]]  # index of a layer -> file of each tensor-parallel rank; {}: no pipeline
    mp_ranks: tuple[Path, ...]
    zero: tuple[tuple[Path, ...], ...]  # file of each data-parallel rank, by mp rank; (): no such files

    @property
    def tensor_parallel_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return len(next(iter(self.layers.values()), self.mp_ranks))

    def path(self, index: int, rank: int) -> Path:
        """Return the file with the part of a layer that a tensor-parallel rank has."""
        return self.layers[index][rank] if self.layers else self.mp_ranks[rank]

    def all(self) -> tuple[Path, ...]:
        """Return all files, sorted."""
        return tuple(sorted({*self.mp_ranks, *(path for group in (*self.layers.values(), *self.zero)
                                               for path in group)}))


def load(path: Path) -> dict[str, Any]:
    """Load one file, memory-mapped. Raises ConfigError."""
    content = load_foreign_pickle(path, mmap=True, also=_ALLOWED)
    if not isinstance(content, dict):
        raise ConfigError(str(path), found=f"a {type(content).__name__}", expected="a dict, as DeepSpeed writes")
    return content


def load_layers(files: LayerFiles) -> dict[int, tuple[dict[str, torch.Tensor], ...]]:
    """Load the parts of each layer: for each tensor-parallel rank, name in the layer -> tensor. Raises ConfigError."""
    if files.layers:
        layers = {index: tuple(_tensors(path, load(path)) for path in paths) for index, paths in files.layers.items()}
        _check_names(files, layers)
        return layers
    parts: dict[int, list[dict[str, torch.Tensor]]] = {}
    for rank, path in enumerate(files.mp_ranks):
        module = load(path).get("module")
        for name, tensor in _tensors(path, module if isinstance(module, dict) else {}).items():
            found = _SEQUENTIAL.fullmatch(name)
            if found is None:
                raise ConfigError(f"{path}: module: {name}", problem="only pipelines, with files "
                                  "layer_LL-model_TT-model_states.pt, and GPT-NeoX's sequential.N are read")
            parts.setdefault(int(found[1]), [{} for _ in files.mp_ranks])[rank][found[2]] = tensor
    found_parts = {index: tuple(own) for index, own in parts.items()}
    _check_names(files, found_parts)
    return found_parts


def _check_names(files: LayerFiles, layers: Mapping[int, tuple[dict[str, torch.Tensor], ...]]) -> None:
    """Raise ConfigError unless the parts of a layer on all tensor-parallel ranks have the same names."""
    for index, parts in layers.items():
        for rank, part in enumerate(parts):
            if different := sorted(part.keys() ^ parts[0].keys()):
                has, lacks = (0, rank) if different[0] in parts[0] else (rank, 0)
                raise ConfigError(f"{files.path(index, lacks)}: {shorten(different[0])}", problem="the file has no "
                                  f"such parameter; {files.path(index, has).name} has it",
                                  remedy="copy the files of one checkpoint")


def _tensors(path: Path, content: dict[str, Any]) -> dict[str, torch.Tensor]:
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{path}: {name}", found=f"a {type(value).__name__}", expected="a tensor")
    return content


def find_files(folder: Path) -> LayerFiles:
    """List the files of a checkpoint. Raises ConfigError if one is missing."""
    layers: dict[int, dict[int, Path]] = defaultdict(dict)
    zero: dict[int, dict[int, Path]] = defaultdict(dict)
    mp_ranks: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if found := _LAYER.fullmatch(path.name):
            layers[int(found[1])][int(found[2])] = path
        elif found := _MP_RANK.fullmatch(path.name):
            mp_ranks[int(found[1])] = path
        elif found := _ZERO.fullmatch(path.name):
            zero[int(found[2])][int(found[1])] = path
    if not mp_ranks:
        raise ConfigError(str(folder), problem="there is no mp_rank_MM_model_states.pt; with ZeRO stage 3, only models "
                          "of transformers are read", remedy="name the folder of one checkpoint")
    degree = 1 + max((rank for parts in layers.values() for rank in parts), default=max(mp_ranks))
    complete = {index: _complete(folder, parts, degree, f"layer_{index:02d}-model_{{:02d}}-model_states.pt")
                for index, parts in sorted(layers.items())}
    ranks = -(-(1 + max(mp_ranks, default=0)) // degree) * degree
    model_states = _complete(folder, mp_ranks, ranks, "mp_rank_{:02d}_model_states.pt")
    return LayerFiles(folder, complete, model_states, _zero_files(folder, zero, ranks))


def _zero_files(folder: Path, zero: dict[int, dict[int, Path]], ranks: int) -> tuple[tuple[Path, ...], ...]:
    if not zero:
        return ()
    replicas = 1 + max(rank for parts in zero.values() for rank in parts)
    prefix = "bf16_" if any(path.name.startswith("bf16_") for parts in zero.values() for path in parts.values()) else ""
    return tuple(_complete(folder, zero[rank], replicas,
                           f"{prefix}zero_pp_rank_{{}}_mp_rank_{rank:02d}_optim_states.pt") for rank in range(ranks))


def _complete(folder: Path, found: dict[int, Path], count: int, name: str) -> tuple[Path, ...]:
    """Return the paths of the ranks 0 to count - 1. Raises ConfigError with the name of a missing file."""
    missing = [rank for rank in range(count) if rank not in found]
    if missing:
        raise ConfigError(str(folder / name.format(missing[0])), problem="the file is missing", remedy=_INCOMPLETE)
    return tuple(found[rank] for rank in range(count))


def check_counts(files: LayerFiles, state: Mapping[str, Any]) -> None:
    """Compare the numbers of files with those of the ranks that the file of mp rank 0 records. Raises ConfigError."""
    ranks = state.get("mp_world_size")
    if isinstance(ranks, int) and ranks != len(files.mp_ranks):
        raise ConfigError(str(files.folder), problem=f"it has {len(files.mp_ranks)} mp_rank files, and "
                          f"{files.mp_ranks[0].name} records {ranks}", remedy=_INCOMPLETE)
    replicas = state.get("dp_world_size")
    if files.zero and isinstance(replicas, int) and replicas != len(files.zero[0]):
        raise ConfigError(str(files.folder), problem=f"it has ZeRO files of {len(files.zero[0])} data-parallel ranks, "
                          f"and {files.mp_ranks[0].name} records {replicas}", remedy=_INCOMPLETE)
