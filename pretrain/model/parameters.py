"""Torch parameters from the description of the model, the part of each that a rank holds, and their dtypes.

Tensor- and expert-parallel ranks hold parts. Initial weights and checkpoints read them from the torch parameters
(`part_of`), and know the complete parameter, whose name and shape do not depend on the parallel degrees.

Consecutive elements of what a rank has, which lie in a flat tensor of an optimizer, form a few boxes: ranges of indexes
in each dimension of the complete parameter. The elements that two flat tensors have in common are the intersections of
their boxes. Each is copied by one strided copy.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Generic, TypeVar

import torch
from torch import nn

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankGroup
from pretrain.errors import ConfigError
from pretrain.model.description import Parameter, Parameters

Shape = tuple[int, ...]
Range = tuple[int, int]  # (first index, end)
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Ranges of indexes in one dimension of the complete parameter; the rank holds them concatenated."""

    shape: Shape  # of the complete parameter
    dim: int
    ranges: tuple[Range, ...]

    @property
    def local_shape(self) -> Shape:
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
            created.is_expert = parameter.is_expert  # type: ignore[attr-defined]
        module.register_parameter(name, created)
    if optional and optional not in parameters:
        module.register_parameter(optional, None)


def set_part(parameter: torch.Tensor, part: Part) -> None:
    """Record which part of the complete parameter this one is.

    The second attribute is DeepSpeed 0.19.8's (runtime/utils.py, is_model_parallel_parameter): it adds the
    gradients of such parameters on all tensor-parallel ranks to the global norm, and counts all others once.
    """
    parameter.part, parameter.tensor_model_parallel = part, True  # type: ignore[attr-defined]


def part_of(parameter: torch.Tensor) -> Part | None:
    """Return the recorded part; None if the rank holds the complete parameter, or its ZeRO-3 partition."""
    part: Part | None = getattr(parameter, "part", None)
    return part


def is_divided_expert(parameter: torch.Tensor) -> bool:
    """Return whether a parameter, or its ZeRO-3 partition, is a part of all experts' matrices."""
    return bool(getattr(parameter, "is_expert", False))


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


@dataclass(frozen=True)
class Box:
    """A range of indexes in each dimension of the complete parameter, and where a flat tensor has its elements.

    The flat tensor has a contiguous block of shape `block`. The box is the range of the block that begins with index
    `first` in dimension `dim`, or the complete block.
    """

    ranges: tuple[Range, ...]
    offset: int  # index of the block's first element in the flat tensor
    block: Shape
    dim: int = 0
    first: int = 0

    def view(self, flat: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
        """Return the elements of `ranges`, which lie in this box, as a view of the flat tensor."""
        view = flat.narrow(0, self.offset, prod(self.block)).view(self.block)
        for dim, ((start, stop), (own, _)) in enumerate(zip(ranges, self.ranges, strict=True)):
            skipped = self.first if dim == self.dim else 0
            view = view.narrow(dim, start - own + skipped, stop - start)
        return view

    def intersection(self, other: "Box") -> tuple[Range, ...] | None:
        """Return the ranges that both boxes have; None if they have no element in common."""
        ranges = []
        for (start, stop), (other_start, other_stop) in zip(self.ranges, other.ranges, strict=True):
            first, end = max(start, other_start), min(stop, other_stop)
            if first >= end:
                return None
            ranges.append((first, end))
        return tuple(ranges)

    def span(self, shape: Shape) -> Range:
        """Return the index of the first element in the flattened complete parameter, and the end of the last one."""
        first = last = 0
        for size, (start, stop) in zip(shape, self.ranges, strict=True):
            first, last = first * size + start, last * size + stop - 1
        return first, last + 1


def boxes_of(shape: Shape, part: Part | None, start: int, length: int, offset: int = 0) -> list[Box]:
    """List the boxes of consecutive elements of a parameter, or of a part of it, in a flat tensor.

    Args:
        shape: of the complete parameter.
        part: what the rank holds; None: the complete parameter.
        start: index of the first element in what the rank holds, flattened.
        offset: index of this element in the flat tensor.
    """
    boxes: list[Box] = []
    for ranges in _blocks(part.local_shape if part else shape, start, start + length):
        block = tuple(stop - first for first, stop in ranges)
        if part is None:
            boxes.append(Box(ranges, offset, block))
        else:
            boxes += _divided(part, ranges, offset, block)
        offset += prod(block)
    return boxes


def _blocks(shape: Shape, start: int, stop: int) -> Iterator[tuple[Range, ...]]:
    """Yield contiguous blocks that have elements `start` to `stop` of a flattened tensor, in this order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, last = start // inner, stop // inner
    if start % inner:
        end = min(stop, (first + 1) * inner)
        yield from (((first, first + 1), *rest) for rest in _blocks(shape[1:], start % inner, end - first * inner))
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    if first <= last and stop % inner:
        yield from (((last, last + 1), *rest) for rest in _blocks(shape[1:], 0, stop % inner))


def _divided(part: Part, ranges: tuple[Range, ...], offset: int, block: Shape) -> Iterator[Box]:
    """Yield the boxes of a block of a part: one for each range of indexes that the part has there."""
    low, high = ranges[part.dim]
    local = 0  # index in the part at which a range of it begins
    for start, stop in part.ranges:
        first, end = max(low, local), min(high, local + stop - start)
        if first < end:
            complete = (start + first - local, start + end - local)
            yield Box((*ranges[:part.dim], complete, *ranges[part.dim + 1:]), offset, block, part.dim, first - low)
        local += stop - start


class BoxIndex(Generic[T]):
    """Finds those boxes of a parameter that may have elements in a range of the flattened parameter.

    Args:
        boxes: each with the value to which it belongs.
    """

    def __init__(self, shape: Shape, boxes: list[tuple[Box, T]]) -> None:
        spans = sorted((*box.span(shape), number) for number, (box, _) in enumerate(boxes))
        self._boxes = [boxes[number] for _, _, number in spans]
        self._starts = [start for start, _, _ in spans]
        self._ends = list(accumulate((stop for _, stop, _ in spans), max))  # the largest end so far

    def between(self, start: int, stop: int) -> list[tuple[Box, T]]:
        """Return the boxes that may have elements from `start` to `stop`."""
        return self._boxes[bisect_right(self._ends, start):bisect_left(self._starts, stop)]
