"""Micro-batches derived from the loader's: other tokens, fewer tokens, or other positions that count.

Shapes: B micro-batch size, T sequence length.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.data.loader import MicroBatch, tokens_of
from pretrain.distributed.collectives import gather

_LENGTH = 32  # tokens of a row of a small batch
# Rows of a small batch over all ranks: with fewer, the positions alone could determine the labels. With more, as many
# as a large global batch has samples, it would take more steps to learn them.
_ROWS = 8


@dataclass(frozen=True)
class SmallBatch:
    """A few short rows, which are the same in all layouts."""

    micro_batches: list[MicroBatch]  # micro batches of this rank
    tokens_RT: Tensor  # tokens of all rows, on every rank

    def shuffled(self, generator: torch.Generator) -> list[MicroBatch]:
        """Replace the tokens of each micro-batch by tokens of the rows in a random order. The labels do not change.

        An order of the micro-batch's own tokens would not be useless: with one row, the tokens name the row.
        """
        tokens = self.tokens_RT.flatten()

        def change(own_BT: Tensor) -> Tensor:
            order = torch.randperm(len(tokens), generator=generator)
            return tokens[order[torch.arange(own_BT.numel()) % len(order)]].view_as(own_BT)

        return map_tokens(self.micro_batches, change)

    def zeroed(self) -> list[MicroBatch]:
        """Replace all tokens by token 0. The labels do not change."""
        return map_tokens(self.micro_batches, torch.zeros_like)

    def entropy_by_prefix(self) -> float:
        """Return the mean entropy in nats of a label, given the tokens up to its position: no model has a lower loss.

        Tokens that repeat at the start of a row count once: with relative positions, attention returns the same for
        any number of equal tokens. Collective.
        """
        return self._entropy(lambda row, position: hash(tuple(_without_first_repeats(row[:position + 1]))))

    def entropy_by_position(self) -> float:
        """Return the mean entropy in nats of a label, given its position: the lowest loss without the tokens."""
        return self._entropy(lambda _, position: position)

    def _entropy(self, context: Callable[[list[int], int], int]) -> float:
        own: Counter[tuple[int, int]] = Counter()
        for batch in self.micro_batches:
            for row, labels in zip(tokens_of(batch).tolist(), batch[1][0].tolist(), strict=True):
                own.update((context(row, position), label) for position, label in enumerate(labels))
        pairs: Counter[tuple[int, int]] = sum(gather(own), Counter())
        contexts = Counter[int]()
        for (key, _), count in pairs.items():
            contexts[key] += count
        return -sum(count * math.log(count / contexts[key]) for (key, _), count in pairs.items()) / sum(pairs.values())


def _without_first_repeats(tokens: list[int]) -> list[int]:
    repeats = next((index for index, token in enumerate(tokens) if token != tokens[0]), len(tokens))
    return tokens[repeats - 1:]


def with_tokens(batch: MicroBatch, tokens_BT: Tensor) -> MicroBatch:
    """Return the micro-batch with other tokens, but the same labels, weights and positions."""
    inputs, labels = batch
    return (tokens_BT if torch.is_tensor(inputs) else (tokens_BT, inputs[1])), labels


def with_labels(batch: MicroBatch, labels_BT: Tensor, weights_BT: Tensor) -> MicroBatch:
    """Return the micro-batch with other labels and weights."""
    return batch[0], (labels_BT, weights_BT)


def map_tokens(batches: list[MicroBatch], change: Callable[[Tensor], Tensor]) -> list[MicroBatch]:
    """Apply `change` to the tokens of each micro-batch."""
    return [with_tokens(batch, change(tokens_of(batch))) for batch in batches]


def only_at(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Return the micro-batch with a loss that is the mean over the positions `first` to `last` - 1 alone."""
    labels_BT, weights_BT = batch[1]
    weights_BT = torch.zeros_like(weights_BT)
    weights_BT[:, first:last] = 1 / (len(weights_BT) * (last - first))
    return with_labels(batch, labels_BT, weights_BT)


def half_labels(batches: list[MicroBatch], remainder: int) -> list[MicroBatch]:
    """Return the micro-batches in which only every second label counts: the even positions (0) or the odd ones (1)."""
    changed = []
    for batch in batches:
        labels_BT, weights_BT = batch[1]
        counts_T = torch.arange(labels_BT.shape[1], device=weights_BT.device) % 2 == remainder
        changed.append(with_labels(batch, labels_BT, weights_BT * counts_T))
    return changed


def small_batch(read: Callable[[int], list[MicroBatch]], *, rank: int, ranks: int) -> SmallBatch:
    """Return 8 rows of at most 32 tokens from the first samples of the run, all of which count equally; collective.

    The rows are divided among the micro-batches of the data-parallel ranks. If there are more micro-batches than rows,
    several have the same row.

    `read` returns the batch of step number n of the run, from 0. It is called for more steps if one has too few tokens.
    `rank` is the data-parallel rank, one of `ranks`.
    """
    first = read(0)
    length = min(_LENGTH, tokens_of(first[0]).shape[1])
    found = [_rows_of(batch, length) for batch in first]
    num_steps = 1
    while sum(len(tokens) for tokens, _ in found) * ranks < _ROWS:
        found += [_rows_of(batch, length) for batch in read(num_steps)]
        num_steps += 1
    own = tuple(torch.cat(columns)[:_ROWS].cpu() for columns in zip(*found, strict=True))
    by_rank = dict(gather((rank, own)))
    tokens_RT, labels_RT = (torch.cat([by_rank[each][column] for each in range(ranks)])[:_ROWS] for column in (0, 1))
    rows = math.ceil(_ROWS / (len(first) * ranks))
    chosen = [torch.arange((index * ranks + rank) * rows, (index * ranks + rank + 1) * rows) % _ROWS
              for index in range(len(first))]
    has_positions = not torch.is_tensor(first[0][0])
    return SmallBatch([_micro_batch(tokens_RT[which], labels_RT[which], has_positions=has_positions)
                       for which in chosen], tokens_RT)


def _rows_of(batch: MicroBatch, length: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels of a micro-batch in rows of `length`."""
    columns = (tokens_of(batch), batch[1][0])
    tokens, labels = (column[:, :column.shape[1] // length * length].reshape(-1, length) for column in columns)
    return tokens, labels


def _micro_batch(tokens_BT: Tensor, labels_BT: Tensor, *, has_positions: bool) -> MicroBatch:
    """Return a micro-batch whose loss is the mean over all tokens; each row is one document."""
    weights_BT = torch.full(labels_BT.shape, 1 / labels_BT.numel())
    if not has_positions:
        return tokens_BT, (labels_BT, weights_BT)
    return (tokens_BT, torch.arange(tokens_BT.shape[1]).repeat(len(tokens_BT), 1)), (labels_BT, weights_BT)
