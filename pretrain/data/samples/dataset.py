"""The interface of all datasets, and what they share.

A dataset has samples of a fixed length, each a pure function of its index. The samples depend on the data, the settings
and the index only: not on ranks, batch sizes, workers or resumes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from pretrain.data.data_spec import DataSpec

Indices = Sequence[int] | npt.NDArray[np.int64]

PADDING = -1
"""in samples: no token. Padding ends a sample; the loader excludes it from the loss"""


class SampleDataset(Protocol):
    """Samples of seq_length + 1 tokens. The label of each token is the next one."""

    name: str
    """name of its losses: train, valid, test, or valid/NAME"""
    seq_length: int
    samples_per_epoch: int
    has_padding: bool
    """whether samples can end with PADDING"""

    @property
    def sources(self) -> tuple[IndexedDataset, ...]:
        """The token files that the samples come from; none for a dataset of --dataset_module."""

    def samples(self, indices: Indices) -> npt.NDArray[np.integer]:
        """Return samples [n, seq_length + 1]. Indices start at 0 and count over all epochs, without end.

        The dtype is the files', such as uint16, so that the loader converts the tokens once; int32 or int64 if
        there is PADDING.
        """

    @property
    def num_tokens(self) -> int:
        """Tokens in these token files that samples are taken from."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of data and settings. These and the seed determine the samples."""

    def record(self) -> dict[str, Any]:
        """Return the `DataRecord` of checkpoint/format/manifest.py."""


class FiniteSamples(SampleDataset, Protocol):
    """Samples whose order begins again after `order_length`."""

    order_length: int


SequenceRange = tuple[IndexedDataset, int, int]
"""the sequences [first, last) of a token file"""


class SampleOrder(Protocol):
    """An order of samples that an extension brings: see Extension.sample_orders.

    It is made of sequences of the .idx, and depends on the number of samples that the run was planned to read.
    """

    def check(self, spec: "DataSpec") -> None:
        """Raise ConfigError for data that the order does not have. Called before numpy is imported."""

    def divide(self, num_sequences: int, fractions: tuple[float, float, float]) -> list[tuple[int, int]]:
        """Return [first, last) sequences of train, valid and test."""

    def samples(self, part: SequenceRange, *, seq_length: int, seed: int, num_samples: int,
                name: str) -> FiniteSamples:
        """Return the samples of a part of a source. Raises ConfigError."""

    def blend(self, parts: Sequence[SequenceRange], weights: Sequence[float] | None, *, seq_length: int, seed: int,
              num_samples: int, name: str) -> FiniteSamples:
        """Return the blend of several parts. Raises ConfigError."""

    def check_length(self, spec: "DataSpec", length: int, needed: int) -> None:
        """Explain by a ConfigError why the order has only `length` samples; otherwise the run rejects it."""


def source_records(dataset: SampleDataset) -> list[tuple[IndexedDataset, dict[str, Any]]]:
    """Return each source with its facts in `record`."""
    record = dataset.record()
    return list(zip(dataset.sources, record.get("sources", [record] if dataset.sources else []), strict=True))


def file_record(indexed: IndexedDataset) -> dict[str, Any]:
    """Return hash, sizes and modification time.

    `sha256` covers every byte of the data; None: not known yet. In that case, size and modification time of the .bin
    identify it.
    """
    status = indexed.file.status()
    return {"sha256": indexed.known_sha256(), "bin_bytes": status.st_size, "bin_mtime_ns": status.st_mtime_ns,
            "idx_bytes": indexed.index.num_bytes}


class TokenRange:
    """The tokens [first_token, last_token) of a `.bin/.idx` pair, for samples of seq_length + 1 tokens.

    Raises ConfigError if the range is shorter than one sample.
    """

    def __init__(self, indexed: IndexedDataset, *, seq_length: int, seed: int, first_token: int,
                 last_token: int | None, name: str) -> None:
        self.indexed, self.seq_length, self.seed, self.name = indexed, seq_length, seed, name
        self.first_token = first_token
        self.last_token = indexed.num_tokens if last_token is None else last_token
        check_num_tokens(indexed, self.num_tokens, seq_length=seq_length, name=name)

    @property
    def num_tokens(self) -> int:
        return self.last_token - self.first_token

    @property
    def sources(self) -> tuple[IndexedDataset, ...]:
        return (self.indexed,)

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a checkpoint records besides the fingerprint."""
        return {**file_record(self.indexed), "first_token": self.first_token, "last_token": self.last_token}


def check_num_tokens(indexed: IndexedDataset, num_tokens: int, *, seq_length: int, name: str) -> None:
    """Raise ConfigError if the tokens of a dataset are fewer than one sample needs."""
    if num_tokens < seq_length + 1:
        raise ConfigError(f"{indexed.prefix} ({name})", found=f"{num_tokens} tokens",
                          expected=f"at least {seq_length + 1} for one sample of --seq_length {seq_length}",
                          remedy="give more data, a larger proportion in --split, or a smaller --seq_length")


_AHEAD = 4096  # indices at once. Of the default order, 4096 starts take 0.8 us each, and 64 starts 24 us each.
_LARGEST_GAP = _AHEAD // 16
_Numbers = npt.NDArray[np.int64]


class LookAhead:
    """Calls `compute(indices [n]) -> values [..., n]`, whose cost per index falls with n.

    A reader that uses most indices, in order, gets values of a table for the next 4096 indices. Values for other
    readers are computed as they ask for them. Threads may call it at the same time.
    """

    def __init__(self, compute: Callable[[_Numbers], _Numbers]) -> None:
        self._compute = compute
        self._next = 0  # the index after the indexes of the last call
        self._table: tuple[int, int, _Numbers] = 0, 0, np.zeros(0, np.int64)

    def __call__(self, indices: _Numbers) -> _Numbers:
        low, high = int(indices.min()), int(indices.max()) + 1
        assert low >= 0
        first, last, values = self._table
        is_sequential = low >= self._next and high - self._next <= _LARGEST_GAP
        self._next = high
        if low < first or high > last:
            if not is_sequential:
                return self._compute(indices)
            first, last, values = self._table = low, low + _AHEAD, self._compute(np.arange(low, low + _AHEAD))
        return values[..., indices - first]
