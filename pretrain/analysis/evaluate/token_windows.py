"""Windows of tokens for an evaluation: each token is predicted once, from at most `seq_length` tokens before it.

Shapes: W windows, T sequence length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pretrain.data.samples.dataset import PADDING, SampleDataset
from pretrain.data.tokenizers.tokenizer import Tokenizer

Tokens = npt.NDArray[np.int64]
_DECODED_TOKENS = 2**16  # about this many tokens are decoded at once


@dataclass(frozen=True)
class WindowSet:
    """Windows of a flat sequence of tokens.

    Window i has the inputs [starts[i], starts[i] + lengths[i]), at most `seq_length` of them. The target of an input is
    the token that follows it. Only the last `scored[i]` targets count. The other inputs are context.
    """

    name: str
    tokens: Callable[[int, int], Tokens]
    """returns the tokens [start, stop) of the flat sequence"""
    seq_length: int
    stride: int
    """number of new targets of each window after the first one"""
    starts: Tokens
    lengths: Tokens
    scored: Tokens
    without_context: Tokens
    """per window: number of tokens that nothing precedes, so that the model does not predict them (0 or 1)"""
    masked_after: int | None = None
    """the target that follows this token does not count"""
    text_bytes: int | None = None
    """UTF-8 bytes of the text that the targets encode; None: decode them"""
    document_end: int | None = None
    """with document attention: the token that ends a document"""

    def __len__(self) -> int:
        return len(self.starts)

    def first(self, number: int) -> "WindowSet":
        """Return the first windows, at most `number`."""
        if number >= len(self):
            return self
        cut = {name: getattr(self, name)[:number] for name in ("starts", "lengths", "scored", "without_context")}
        return replace(self, **cut, text_bytes=None)

    def by_length(self) -> Tokens:
        """Return the indices of all windows, the longest window first, so that batches have little padding."""
        return np.argsort(-self.lengths, kind="stable")

    def batch(self, indices: Sequence[int], rows: int) -> tuple[Tokens, Tokens, npt.NDArray[np.float32], Tokens]:
        """Return inputs, targets and weights [rows, T] of these windows, and `without_context` [rows].

        T is the length of the longest of these windows, at least 1. Weights are 1 for targets that count and 0 for
        others. Rows without a window have only zeros.
        """
        longest = max((int(self.lengths[index]) for index in indices), default=0)
        inputs, targets = (np.zeros((rows, max(longest, 1)), np.int64) for _ in range(2))
        weights, alone = np.zeros(inputs.shape, np.float32), np.zeros(rows, np.int64)
        for row, index in enumerate(indices):
            start, length, scored = int(self.starts[index]), int(self.lengths[index]), int(self.scored[index])
            alone[row] = self.without_context[index]
            if length:
                tokens = self.tokens(start, start + length + 1)
                inputs[row, :length], targets[row, :length] = tokens[:-1], tokens[1:]
                weights[row, length - scored:length] = 1
        if self.masked_after is not None:
            weights[inputs == self.masked_after] = 0
        weights[targets == PADDING] = 0
        inputs[inputs == PADDING] = targets[targets == PADDING] = 0
        return inputs, targets, weights, alone

    def target_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges [first, last) of the flat sequence that the targets cover. Adjacent ranges are merged."""
        last = self.starts + self.lengths + (self.lengths > 0)
        first = last - self.scored
        last = last + (self.without_context * (self.lengths == 0))  # a document of a single token
        first = first - self.without_context * (self.lengths > 0)
        joins = first[1:] == last[:-1]
        return list(zip(first[np.r_[True, ~joins]].tolist(), last[np.r_[~joins, True]].tolist(), strict=True))

    def decoded_bytes(self, tokenizer: Tokenizer, part: int = 0, parts: int = 1) -> int:
        """Return the UTF-8 bytes of the decoded targets that count. Several processes may each count one part.

        Documents are decoded one by one. Where a range begins or ends inside a document, the count may differ by a few
        bytes from the count of the text.
        """
        total = 0
        for number, (tokens, counted) in enumerate(self._chunks(tokenizer.eod_token)):
            if number % parts == part:
                total += sum(len(tokenizer.decode(document).encode("utf-8", "replace"))
                             for document in _documents(tokens, counted, tokenizer.eod_token))
        return total

    def _chunks(self, eod_token: int | None) -> Iterator[tuple[Tokens, npt.NDArray[np.bool_]]]:
        """Yield the targets in chunks that end with a document if possible, and whether each target counts."""
        for first, last in self.target_ranges():
            start = first
            while start < last:
                tokens = self.tokens(start, min(start + _DECODED_TOKENS, last))
                ends = np.flatnonzero(tokens == eod_token) if eod_token is not None else np.zeros(0, np.int64)
                if start + len(tokens) < last and len(ends):
                    tokens = tokens[:int(ends[-1]) + 1]
                counted = np.ones(len(tokens), bool)
                if self.masked_after is not None:
                    before = self.tokens(start - 1, start) if start else tokens[:1]
                    counted = np.concatenate((before, tokens[:-1])) != self.masked_after
                yield tokens, counted & (tokens != PADDING)
                start += len(tokens)


def _documents(tokens: Tokens, counted: npt.NDArray[np.bool_], eod_token: int | None) -> list[Sequence[int]]:
    """Divide tokens after each end-of-document token, and leave out those that do not count."""
    ends = np.flatnonzero(tokens == eod_token) + 1 if eod_token is not None else np.zeros(0, np.int64)
    parts = zip(np.split(tokens, ends), np.split(counted, ends), strict=True)
    return [document[keep].tolist() for document, keep in parts if len(document)]


def rolling_windows(name: str, tokens: Callable[[int, int], Tokens], ranges: Sequence[tuple[int, int]], *,
                    seq_length: int, stride: int, first_token_counts: bool = False, masked_after: int | None = None,
                    text_bytes: int | None = None) -> WindowSet:
    """Return windows over each range [first, last) of the flat sequence. Each token is the target of one window.

    Args:
        stride: number of targets of each window after a range's first window, which has `seq_length` targets. With
            a smaller stride, more tokens precede each target.
        first_token_counts: whether the first token of a range counts, as a token without context, or is context only.
    """
    columns: list[list[Tokens]] = [[], [], [], []]
    for first, last in ranges:
        targets = last - first - 1
        ends = np.arange(min(seq_length, targets), targets + stride, stride, dtype=np.int64).clip(max=targets)
        if targets <= seq_length:
            ends = np.array([targets], np.int64)
        lengths = np.minimum(ends, seq_length)
        alone = np.zeros(len(ends), np.int64)
        alone[0] = int(first_token_counts)
        for column, values in zip(columns, (first + ends - lengths, lengths, np.diff(ends, prepend=0), alone),
                                  strict=True):
            column.append(values)
    starts, lengths, scored, alone = (np.concatenate(column) if column else np.zeros(0, np.int64)
                                      for column in columns)
    return WindowSet(name, tokens, seq_length, stride, starts, lengths, scored, alone, masked_after, text_bytes)


def sample_windows(name: str, dataset: SampleDataset, number: int, *, masked_after: int | None) -> WindowSet:
    """Return the first `number` samples of a dataset, as training and its evaluations read them."""
    width = dataset.seq_length + 1

    def tokens(start: int, stop: int) -> Tokens:
        index, first = divmod(start, width)
        return dataset.samples([index])[0][first:first + stop - start].astype(np.int64)

    full = np.full(number, dataset.seq_length, np.int64)
    return WindowSet(name, tokens, dataset.seq_length, dataset.seq_length, np.arange(number, dtype=np.int64) * width,
                     full, full, np.zeros_like(full), masked_after)
