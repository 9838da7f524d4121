"""Documents that are packed into one sample: each token sees only the tokens of its own document.

A query sees the keys from the first token of its document to itself. No query is without a key.

Shapes: B batch, T positions, H query heads.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_Tables = tuple[torch.Tensor, torch.Tensor]


def first_keys(positions_BT: torch.Tensor, window: int) -> torch.Tensor:
    """Return int32 [B, T]: the first key that each query sees. It sees the following ones up to its own.

    Args:
        positions_BT: integer position of each token inside its document.
        window: number of latest positions that a query sees, with its own; 0: all.
    """
    queries_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)
    first_BT = queries_T - positions_BT
    if window:
        first_BT = torch.maximum(first_BT, queries_T - window + 1)
    return first_BT.int()


class Documents:
    """The documents of a micro-batch. Masks and tables are made at their first use, and shared by all blocks.

    Args:
        positions_BT: integer position of each token inside its document. A document begins where it is 0, and with
            each sample.
    """

    def __init__(self, positions_BT: torch.Tensor) -> None:
        self.positions_BT = positions_BT
        self.rope_tables: dict[tuple[bool, torch.dtype], _Tables] = {}  # filled by rope.py
        self.block_masks: dict[int, Any] = {}  # by window; filled by flex_attention.py
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._blocks: dict[int, list[list[RowBlock]]] = {}

    def mask(self, window: int, dtype: torch.dtype, alibi_T: torch.Tensor | None = None) -> torch.Tensor:
        """Return what is added to the scores: [B, 1, T, T], or with ALiBi [B, H, T, T].

        It is 0, or the term of ALiBi, where a query (row) sees a key (column), and -inf elsewhere. It has the dtype of
        the queries, because torch would otherwise convert it, and save the result, in each block.

        Args:
            window: number of latest positions that a query sees, with its own; 0: all.
            alibi_T: the terms of ALiBi, [1, H, T, T]; always the same one.
        """
        key = (window, dtype)
        if key not in self._masks:
            with torch.no_grad():
                self._masks[key] = self._make_mask(window, dtype, alibi_T)
        return self._masks[key]

    def _make_mask(self, window: int, dtype: torch.dtype, alibi_T: torch.Tensor | None) -> torch.Tensor:
        length, device = self.positions_BT.shape[1], self.positions_BT.device
        keys_T = torch.arange(length, device=device)
        queries_T1 = keys_T[:, None]
        first_BT1 = first_keys(self.positions_BT, window)[..., None]
        hidden_B1TT = ((keys_T < first_BT1) | (keys_T > queries_T1))[:, None]
        terms = torch.zeros(1, dtype=dtype, device=device) if alibi_T is None else alibi_T
        return torch.where(hidden_B1TT, torch.full((), -math.inf, dtype=dtype, device=device), terms)

    @cached_property
    def are_whole_samples(self) -> bool:
        """Return whether no document begins inside a sample. Waits for the device."""
        return bool((self.positions_BT[:, 1:] != 0).all())

    def row_blocks(self, rows: int) -> list[list["RowBlock"]]:
        """Return for each sample the blocks of at most `rows` queries that an operator on the CPU computes."""
        if rows not in self._blocks:
            length = self.positions_BT.shape[1]
            samples, starts = (self.positions_BT == 0).nonzero().unbind(1)
            counts = samples.bincount(minlength=len(self.positions_BT)).tolist()
            self._blocks[rows] = [divide(starts_of_sample.tolist(), length, rows)
                                  for starts_of_sample in starts.split(counts)]
        return self._blocks[rows]


@dataclass(frozen=True)
class RowBlock:
    """Consecutive queries of a sample."""

    rows: slice
    first_key: int  # first token of the first query's document
    starts: tuple[int, ...]  # first tokens of the documents that begin after the first query and before the last one


def divide(starts: list[int], length: int, rows: int) -> list[RowBlock]:
    """Divide the queries of a sample into blocks of at most `rows` queries; its documents begin at `starts`, from 0 on.

    All queries of a block are computed with all keys of the block. A block ends with a long document if this saves more
    than another block costs, about two squares of rows * rows scores.
    """
    blocks, start = [], 0
    while start < length:
        stop = min(start + rows, length)
        inside = bisect_right(starts, start)
        first_key = starts[inside - 1]
        following = starts[inside:bisect_left(starts, stop, inside)]
        if following and (stop - following[0]) * (following[0] - first_key) > 2 * rows * rows:
            stop, following = following[0], []
        blocks.append(RowBlock(slice(start, stop), first_key, tuple(following)))
        start = stop
    return blocks
