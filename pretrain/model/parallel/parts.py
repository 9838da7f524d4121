"""`Part`: which elements of a complete parameter a rank holds under tensor or expert parallelism.

A layer that creates a part of a parameter calls `set_part`. Initial weights, checkpoints and the estimate then know the
complete parameter, whose name and shape do not depend on the parallel degrees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pretrain.distributed.parallel_groups import RankGroup


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
