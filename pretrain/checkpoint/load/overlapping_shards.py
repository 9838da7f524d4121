"""`Box`: a block of a complete parameter that lies in a flat tensor. It needs no checkpoint and no engine.

A flat tensor holds consecutive elements of what a rank has of a parameter: the complete parameter, or a `Part` of it.
Such elements form a few boxes: ranges of indexes in each dimension of the complete parameter. The elements that two
flat tensors have in common are the intersections of their boxes. Each is copied by one strided copy.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Generic, TypeVar

import torch

from pretrain.model.parameters import Part

Shape = tuple[int, ...]
Range = tuple[int, int]  # (first index, end)
T = TypeVar("T")


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
