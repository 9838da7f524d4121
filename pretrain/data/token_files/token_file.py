"""Open token files: local ones, and what the extension that reads a URL returns (`Extension.token_files`)."""

import contextlib
import os
import resource
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pretrain.active_extensions import reader_of
from pretrain.errors import ConfigError
from pretrain.remote import without_credentials

_OTHER_FILES = 1024  # room for the files of libraries, checkpoints and connections


class TokenFile:
    """An open .bin or .idx file. Threads may read it at the same time.

    It is read, not mapped into memory: if a mapped file is truncated, the next access kills the process with SIGBUS. If
    the file is replaced by another one of the same name, the old one remains readable. All processes of a host share
    the pages that the kernel caches.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def status(self) -> os.stat_result:
        """Return the status of the open file, not of its name."""
        return os.fstat(self.descriptor)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes [start, start + num_bytes). Raises ConfigError if the file has become shorter."""
        data = self._read(start, num_bytes)
        while len(data) < num_bytes:  # one call reads at most 2 GiB
            part = self._read(start + len(data), num_bytes - len(data))
            if not part:
                raise ConfigError(str(self.path), problem=f"the file was truncated to {self.status().st_size} bytes "
                                  f"while it was in use: bytes {start} to {start + num_bytes} are missing",
                                  remedy="restore it, and start again")
            data += part
        return data

    def read_pieces(self, starts: Iterable[int], sizes: Iterable[int], buffer: npt.NDArray[np.uint8]) -> None:
        """Fill `buffer` with sizes[i] bytes from starts[i] on, piece after piece. Raises ConfigError as `read`."""
        view, descriptor, preadv = buffer.data, self.descriptor, os.preadv
        first = 0
        for start, num_bytes in zip(starts, sizes, strict=True):
            piece = view[first:first + num_bytes]
            try:
                count = preadv(descriptor, (piece,), start)
            except OSError as error:
                error.filename = str(self.path)
                raise
            if count < num_bytes:
                piece[count:] = self.read(start + count, num_bytes - count)
            first += num_bytes

    def _read(self, start: int, num_bytes: int) -> bytes:
        try:
            return os.pread(self.descriptor, num_bytes, start)
        except OSError as error:
            error.filename = str(self.path)
            raise


def allow_open_files(number: int) -> None:
    """Raise the limit of open files of this process, if it can, so that it has room for this number of token files.

    A blend may have hundreds of them, and the limit is often 1,024.
    """
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < number + _OTHER_FILES:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(number + _OTHER_FILES, hard_limit), hard_limit))


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

    `settings`: of extensions, by their names; an extension that is missing gets its defaults.
    """
    extension, function = reader_of("token_files", url.address, str(url))
    defaults = None if extension.settings is None else extension.settings()
    files: TokenFiles = function(url.address, (settings or {}).get(extension.name, defaults))
    return files
