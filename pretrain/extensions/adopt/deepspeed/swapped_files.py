"""The files of fp32 weights and optimizer states that DeepSpeed has swapped out to NVMe at ZeRO stage 3.

A checkpoint has a copy of them in `offloaded_tensors/rankNN/`: `FIRST_LAST.tensor.swp` has the weights of a sub-group,
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
from pretrain.errors import ConfigError

SUFFIX = ".swp"
_BYTES = 4  # of an fp32 number
_WEIGHTS = re.compile(r"(\d+)_(\d+)\.tensor\.swp")


@dataclass(frozen=True)
class SwappedFiles:
    """The swapped tensors of one rank."""

    folder: Path  # of the checkpoint
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
