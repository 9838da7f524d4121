"""Micro-batches derived from the loader's: other tokens, fewer tokens, or other positions that count.

Shapes: B micro-batch size, T sequence length.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pretrain.data.loader import MicroBatch

_LENGTH = 32  # tokens of a row of a small batch
# Rows of a small batch over all ranks: with fewer, the positions alone could determine the labels.
_ROWS = 8


def tokens_of(batch: MicroBatch) -> Tensor:
    """Return the tokens [B, T] of a micro-batch."""
    inputs = batch[0]
    return inputs if torch.is_tensor(inputs) else inputs[0]


def wrong_labels(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return where a label is not the next token of its row, and where labels count, both [B, T - 1] of bools.

    The first is false where labels do not count, because they may be padding.
    """
    labels_BT, weights_BT = batch[1]
    counts = weights_BT[:, :-1] > 0
    return (labels_BT[:, :-1] != tokens_of(batch)[:, 1:]) & counts, counts


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


def zeroed(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Replace all tokens by token 0. The labels do not change."""
    return map_tokens(batches, torch.zeros_like)


def shuffled(batches: list[MicroBatch], generator: torch.Generator) -> list[MicroBatch]:
    """Put the tokens of each micro-batch into a random order. The labels do not change."""
    return map_tokens(batches, lambda tokens_BT: tokens_BT.flatten()[
        torch.randperm(tokens_BT.numel(), generator=generator)].view_as(tokens_BT))


def only_at(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Return the micro-batch with a loss that is the mean over the positions `first` to `last` - 1 alone."""
    labels_BT, weights_BT = batch[1]
    weights_BT = torch.zeros_like(weights_BT)
    weights_BT[:, first:last] = 1 / (len(weights_BT) * (last - first))
    return with_labels(batch, labels_BT, weights_BT)


def small_batch(read: Callable[[int], list[MicroBatch]], data_parallel_size: int) -> list[MicroBatch]:
    """Return the first micro-batches of the run, cut to a few rows of at most 32 tokens that all count equally.

    `read` returns the batch of step number n of the run, from 0. It is called for more steps if one has too few tokens.
    """
    batches = read(0)
    rows = math.ceil(_ROWS / (len(batches) * data_parallel_size))
    length = min(_LENGTH, tokens_of(batches[0]).shape[1])
    parts = [[_rows_of(batch, length) for batch in batches]]
    while sum(len(part[0][0]) for part in parts) < rows:
        parts.append([_rows_of(batch, length) for batch in read(len(parts))])
    return [_micro_batch(*(torch.cat(columns)[:rows] for columns in zip(*of_steps, strict=True)),
                         has_positions=not torch.is_tensor(batches[0][0]))
            for of_steps in zip(*parts, strict=False)]


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
