"""Torch parameters from the description of the model, the part of each that a rank holds, and their dtypes.

Tensor- and expert-parallel ranks hold parts. Initial weights and checkpoints read them from the torch parameters
(`part_of`), and know the complete parameter, whose name and shape do not depend on the parallel degrees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankGroup
from pretrain.errors import ConfigError
from pretrain.model.description import Parameter, Parameters


@dataclass(frozen=True)
class Part:
    """Ranges of indexes in one dimension of the complete parameter; the rank holds them concatenated."""

    shape: tuple[int, ...]  # of the complete parameter
    dim: int
    ranges: tuple[tuple[int, int], ...]  # (first index, end)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what the rank holds."""
        size = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1:])

    def of(self, complete: torch.Tensor) -> torch.Tensor:
        """Return this part of a complete tensor: a view if it is one range, otherwise a copy."""
        pieces = [complete.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def split_range(size: int, group: RankGroup, start: int = 0) -> tuple[int, int]:
    """Return this rank's range of `size` indexes that begin at `start`. The sizes of the ranks differ by at most 1."""
    return start + size * group.rank // group.size, start + size * (group.rank + 1) // group.size


def split_segments(sizes: Sequence[int], group: RankGroup) -> tuple[tuple[int, int], ...]:
    """Return this rank's range of each segment. The segments follow each other in one dimension."""
    ranges, start = [], 0
    for size in sizes:
        ranges.append(split_range(size, group, start))
        start += size
    return tuple(ranges)


def part_of_rank(parameter: Parameter, groups: ParallelGroups) -> Part | None:
    """Return the part of a parameter that this rank holds; None if it holds all of it."""
    if parameter.is_expert and groups.expert.size > 1:
        return Part(parameter.shape, 0, (split_range(parameter.shape[0], groups.expert),))
    if parameter.split_dim is not None and groups.tensor.size > 1:
        return Part(parameter.shape, parameter.split_dim, split_segments(parameter.segments, groups.tensor))
    return None


def create_parameters(module: nn.Module, parameters: Parameters, groups: ParallelGroups = NO_GROUPS, *,
                      optional: str = "") -> None:
    """Register in `module` this rank's part of each parameter, uninitialized.

    initialize_parameters or a checkpoint fills them.

    Args:
        optional: name of a parameter that is None if it is not described.
    """
    for name, parameter in parameters.items():
        part = part_of_rank(parameter, groups)
        created = nn.Parameter(torch.empty(parameter.shape if part is None else part.local_shape))
        if part is not None:
            set_part(created, part)
        module.register_parameter(name, created)
    if optional and optional not in parameters:
        module.register_parameter(optional, None)


def set_part(parameter: torch.Tensor, part: Part) -> None:
    """Record which part of the complete parameter this one is.

    The second attribute is that of DeepSpeed 0.19.8 (runtime/utils.py, is_model_parallel_parameter): it adds the
    gradients of such parameters on all tensor-parallel ranks to the global norm, and counts all others once.
    """
    parameter.part, parameter.tensor_model_parallel = part, True  # type: ignore[attr-defined]


def part_of(parameter: torch.Tensor) -> Part | None:
    """Return the recorded part; None if the rank holds the complete parameter, or its ZeRO-3 partition."""
    part: Part | None = getattr(parameter, "part", None)
    return part


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_dtype(module: torch.nn.Module, precision: str) -> None:
    """Raise ConfigError unless the weights, or this rank's partitions of them, are in the precision that was chosen.

    DeepSpeed may choose another one by the device (defect S).
    """
    for name, weight in module.named_parameters():
        found = getattr(weight, "ds_tensor", weight).dtype
        if found != DTYPES[precision]:
            raise ConfigError(name, found=f"weights in {found}", expected=f"{DTYPES[precision]}, the precision chosen",
                              remedy="this device or DeepSpeed does not keep it: choose another precision")
