"""A .bin or .idx file, open for reading."""

import contextlib
import os
import resource
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.errors import ConfigError

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
