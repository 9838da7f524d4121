"""Token files at URLs: what the extension that reads them returns (`Extension.token_files`)."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pretrain.active_extensions import reader_of
from pretrain.remote import without_credentials


@dataclass(frozen=True)
class Url:
    """A URL in place of a path. As text, it has no user name and no password."""

    address: str

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(str(self)).name

    def __str__(self) -> str:
        return without_credentials(self.address)


class TokenReader(Protocol):
    """A .bin file. Threads read it at the same time. Methods raise ConfigError if it cannot be read."""

    path: Any  # its name in messages

    def status(self) -> os.stat_result:
        """Return size and modification time, or a number that stands for the version."""

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes [start, start + num_bytes)."""

    def read_pieces(self, starts: Iterable[int], sizes: Iterable[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Fill `buffer` with sizes[i] bytes from starts[i] on, piece after piece."""


class TokenFiles(Protocol):
    """The files of a data set at a URL. Methods raise ConfigError."""

    note: str  # one line about the data for the start of a run; "": none

    def read_small_file(self, suffix: str) -> bytes | None:
        """Return the content of PREFIX + suffix, such as ".meta.json"; None if there is no such file."""

    def copy_small_files(self) -> tuple[Path, str]:
        """Bring copies of the .idx and, if there are any, .meta.json, .sha256.json and .summary.json to a local disk.

        Return the prefix of the copies, and the SHA-256 of the .idx.
        """

    def open_tokens(self) -> TokenReader:
        """Open the .bin."""


def token_files_at(url: Url, settings: Mapping[str, Any] | None = None) -> TokenFiles:
    """Return the files of a data set. Raises ConfigError if no extension reads such URLs.

    `settings`: of extensions, by their names; those of one that is missing have their defaults.
    """
    extension, function = reader_of("token_files", url.address, str(url))
    defaults = None if extension.settings is None else extension.settings()
    files: TokenFiles = function(url.address, (settings or {}).get(extension.name, defaults))
    return files
