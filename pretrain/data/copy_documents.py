"""Copy documents of data sets to new ones, with little memory for any number and length of documents.

The .meta.json of the new data sets keeps where the documents come from, and what left out or changed documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.summary import entropy_nats
from pretrain.data.token_files.index_file import ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.inspect_files import Advance
from pretrain.data.token_files.writer import IndexedWriter, existing_file
from pretrain.errors import ConfigError
from pretrain.paths import check_folder, check_space

CHUNK_DOCUMENTS = 2**16  # copied at once
_CHUNK_TOKENS = 2**20
_LARGEST_COUNTED = 2**24  # token; larger ones do not come from a tokenizer
OF_TOKENIZER = ("vocab_size", "tokenizer", "tokenizer_sha256", "bos_token", "eod_token")
_COUNTS = ("num_tokens", "num_documents", "max_token", "entropy_nats")  # facts about one data set alone
_COUNT = "documents"  # begins the names of counts among the facts of a step of `prepare`
MERGED_FROM = "merged_from"
_SEQUENCE_BYTES = 32  # in the .idx, and in temporary files


def meta_of(data: IndexedDataset) -> dict[str, Any]:
    """Return the facts about the tokenizer in PREFIX.meta.json; {} if there is none, or if it is of other data."""
    return {key: data.meta[key] for key in OF_TOKENIZER if key in data.meta}


def provenance(data: IndexedDataset) -> dict[str, Any]:
    """Return where the documents come from, and what left out or changed documents; {} if that is unknown."""
    found = {key: value for key, value in data.meta.items() if value and key not in (*OF_TOKENIZER, *_COUNTS)}
    return {key: {name: fact for name, fact in value.items() if not name.startswith(_COUNT)}
            if isinstance(value, dict) else value
            for key, value in sorted(found.items(), key=lambda item: item[0] == MERGED_FROM)}


class CopyWriter(IndexedWriter):
    """IndexedWriter that counts the tokens, and adds the counts to the .meta.json."""

    def __init__(self, prefix: str, dtype: npt.DTypeLike) -> None:
        super().__init__(prefix, dtype)
        self._counts, self._max_token = np.zeros(0, np.int64), 0

    def add_tokens(self, tokens: npt.ArrayLike) -> None:
        """Append and count tokens [n], none of them below 0."""
        super().add_tokens(tokens)
        values = np.asarray(tokens)
        if not values.size:
            return
        self._max_token = max(self._max_token, int(values.max()))
        if self._max_token < _LARGEST_COUNTED:
            counts = np.bincount(values, minlength=len(self._counts))
            counts[: len(self._counts)] += self._counts
            self._counts = counts

    def copy_range(self, data: IndexedDataset, first: int, last: int, advance: Advance) -> None:
        """Append the documents [first, last), with their division into sequences."""
        for values in _tokens(data, data.document_offset(first), data.document_offset(last), advance):
            self.add_tokens(values)
        low, high = int(data.document_index(first, first)[0]), int(data.document_index(last, last)[0])
        base = self.num_sequences
        for start, stop in ranges(low, high, CHUNK_DOCUMENTS):
            self.add_sequences(data.sequence_lengths(start, stop))
        for start, stop in ranges(first, last, CHUNK_DOCUMENTS):
            self.end_documents(data.document_index(start, stop)[1:] - low + base)

    def finalize(self, meta: Mapping[str, Any] | None = None) -> None:
        """Complete the files. `meta`: the facts to which the counts of the tokens are added."""
        counts: dict[str, Any] = {"num_tokens": self.num_tokens, "num_documents": self.num_documents,
                                  "max_token": self._max_token}
        if self._max_token < _LARGEST_COUNTED:
            counts["entropy_nats"] = entropy_nats(self._counts)
        super().finalize({**(meta or {}), **counts})


def copy_chosen(data: IndexedDataset, first: int, choice: npt.NDArray[np.int8], writers: Sequence[IndexedWriter],
                 advance: Advance) -> None:
    """Append each of the documents [first, first + n) to the writer that `choice` [n] names."""
    last = first + len(choice)
    bounds, index = data.document_offsets(first, last), data.document_index(first, last)
    start = int(bounds[0])
    for values in _tokens(data, start, int(bounds[-1]), advance):
        inside = np.clip(bounds, start, start + values.size)
        chosen = np.repeat(choice, inside[1:] - inside[:-1])
        for number, writer in enumerate(writers):
            writer.add_tokens(values[chosen == number])
        start += values.size
    num_sequences = index[1:] - index[:-1]
    lengths = data.sequence_lengths(int(index[0]), int(index[-1]))
    for number, writer in enumerate(writers):
        ends = writer.num_sequences + np.cumsum(num_sequences[choice == number])
        writer.add_sequences(lengths[np.repeat(choice, num_sequences) == number])
        writer.end_documents(ends)


def _tokens(data: IndexedDataset, first: int, last: int, advance: Advance) -> Iterator[npt.NDArray[np.generic]]:
    for start, stop in ranges(first, last, _CHUNK_TOKENS):
        values = data.raw_tokens(start, stop)
        if int(values.min()) < 0:
            raise ConfigError(str(data.bin_path), found=f"token {values.min()}", expected="no token below 0",
                              remedy="write it again with `ds-pretrain prepare`")
        yield values
        advance((stop - start) * data.dtype.itemsize, "")


def check_output(outputs: Sequence[str], sources: Sequence[IndexedDataset], where: str, *, overwrite: bool,
                 num_bytes: int) -> None:
    """Raise ConfigError if an output exists or is an input, or if the disk has less than `num_bytes` free."""
    names = [Path(output).resolve() for output in outputs]
    for output, name in zip(outputs, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(where, problem=f"{output} is given twice")
        if any(name == source.prefix.resolve() for source in sources if isinstance(source.prefix, Path)):
            raise ConfigError(where, problem=f"{output} is also an input", remedy="give another prefix")
        if (existing := existing_file(output)) and not overwrite:
            raise ConfigError(where, problem=f"{existing} exists",
                              remedy="give another prefix, or replace the files by --overwrite")
        check_folder(Path(output).absolute().parent, where)
    check_space(Path(outputs[0]), where, num_bytes + _SEQUENCE_BYTES * sum(data.num_sequences for data in sources))
