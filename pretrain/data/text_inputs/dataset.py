"""A dataset that flags name in place of inputs, and that an extension opens (`Extension.datasets`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pretrain.data.text_inputs.chunk import Chunk, Position


@dataclass(frozen=True)
class DataFile:
    """A data file of a dataset."""

    path: str
    """a local path, or a URL that an extension reads"""
    num_bytes: int
    kind: str
    """"parquet", "jsonl", or "rows": another format; all but Parquet are read by the dataset"""
    compression: str = ""


class OpenDataset(Protocol):
    """A dataset whose files are known."""

    @property
    def files(self) -> Sequence[DataFile]:
        """The files, in the order in which they are read."""

    @property
    def commit(self) -> str:
        """The commit at which its files never change; "": they are local."""

    def describe(self) -> str:
        """Return what it is, in one line."""

    def record(self) -> dict[str, Any]:
        """Return what determines its rows, as JSON values: a preparation resumes only if they are equal."""

    def facts(self) -> dict[str, Any]:
        """Return where its rows come from, for PREFIX.meta.json."""

    def read(self, path: str, column: str, start: Position, *, chunk_bytes: int, long_bytes: int) -> Iterator[Chunk]:
        """Yield the values of a column of a file in chunks, from the row `start.offset` on. Raises ConfigError.

        The chunks from a position on are always the same. A value of more than `long_bytes` becomes several of them.
        """


class NamedDataset(ABC):
    """A dataset as flags name it."""

    name: str
    words: Sequence[str]
    """flags and values that name it"""

    @property
    @abstractmethod
    def flag(self) -> str:
        """The flag with its value, for messages."""

    @abstractmethod
    def pinned(self, record: Mapping[str, Any]) -> "NamedDataset":
        """Return the same one, whose rows do not change any more.

        record: what `OpenDataset.record` returned for an earlier preparation; {} if there is none. Raises ConfigError.
        """

    @abstractmethod
    def open(self) -> OpenDataset:
        """Find the files. Raises ConfigError."""
