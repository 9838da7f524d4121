"""Copy documents between token files, with little memory for any number and length of documents."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from pretrain.data.files.check_index import check_all_entries
from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.files.writer import IndexedWriter
from pretrain.data.prepare.statistics import entropy_nats
from pretrain.errors import ConfigError

Advance = Callable[[int, str], None]  # of a ProgressBar: number of bytes, note
CHUNK_DOCUMENTS = 2**16
_CHUNK_TOKENS = 2**20
_LARGEST_COUNTED = 2**24  # token; larger ones do not come from a tokenizer


class TokenCounts:
    """Frequencies of the tokens that are copied."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)
        self.max_token = 0

    def add(self, tokens: npt.NDArray[np.generic]) -> None:
        """Count tokens [n], none of them below 0."""
        if not tokens.size:
            return
        self.max_token = max(self.max_token, int(tokens.max()))
        if self.max_token < _LARGEST_COUNTED:
            counts = np.bincount(tokens, minlength=len(self._counts))
            counts[: len(self._counts)] += self._counts
            self._counts = counts

    def entropy_nats(self) -> float | None:
        """Return the entropy per token of the frequencies; None if there are token ids too large to be counted."""
        return entropy_nats(self._counts) if self.max_token < _LARGEST_COUNTED else None


def open_checked(prefix: str) -> IndexedDataset:
    """Open a data set and check every entry of its index. Raises ConfigError."""
    data = IndexedDataset(prefix)
    if not data.index.is_small:
        check_all_entries(data.index)
    return data


def copy_range(data: IndexedDataset, first: int, last: int, writer: IndexedWriter, counts: TokenCounts,
               advance: Advance) -> None:
    """Append the documents [first, last), with their division into sequences."""
    for values in _tokens(data, data.document_offset(first), data.document_offset(last), advance):
        writer.add_tokens(values)
        counts.add(values)
    low, high = int(data.document_index(first, first)[0]), int(data.document_index(last, last)[0])
    base = writer.num_sequences
    for start, stop in chunks(low, high, CHUNK_DOCUMENTS):
        writer.add_sequences(data.sequence_lengths(start, stop))
    for start, stop in chunks(first, last, CHUNK_DOCUMENTS):
        writer.end_documents(data.document_index(start, stop)[1:] - low + base)


def copy_chosen(data: IndexedDataset, first: int, choice: npt.NDArray[np.int8],
                writers: list[tuple[IndexedWriter, TokenCounts]], advance: Advance) -> None:
    """Append each of the documents [first, first + n) to the writer that `choice` [n] names."""
    last = first + len(choice)
    bounds, index = data.document_offsets(first, last), data.document_index(first, last)
    for start, values in _numbered(_tokens(data, int(bounds[0]), int(bounds[-1]), advance), int(bounds[0])):
        inside = np.clip(bounds, start, start + values.size)
        chosen = np.repeat(choice, inside[1:] - inside[:-1])
        for number, (writer, counts) in enumerate(writers):
            part = values[chosen == number]
            writer.add_tokens(part)
            counts.add(part)
    num_sequences = index[1:] - index[:-1]
    lengths = data.sequence_lengths(int(index[0]), int(index[-1]))
    for number, (writer, _) in enumerate(writers):
        ends = writer.num_sequences + np.cumsum(num_sequences[choice == number])
        writer.add_sequences(lengths[np.repeat(choice, num_sequences) == number])
        writer.end_documents(ends)


def chunks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """Divide [first, last) into ranges of at most `size`."""
    for start in range(first, last, size):
        yield start, min(start + size, last)


def _tokens(data: IndexedDataset, first: int, last: int, advance: Advance) -> Iterator[npt.NDArray[np.generic]]:
    for start, stop in chunks(first, last, _CHUNK_TOKENS):
        values = data.raw_tokens(start, stop)
        if int(values.min()) < 0:
            raise ConfigError(str(data.bin_path), found=f"token {values.min()}", expected="no token below 0",
                              remedy="write it again with tools/prepare_data.py")
        yield values
        advance((stop - start) * data.dtype.itemsize, "")


def _numbered(parts: Iterator[npt.NDArray[np.generic]], start: int) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
    """Yield each part with the position of its first token."""
    for values in parts:
        yield start, values
        start += values.size
