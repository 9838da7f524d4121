"""A .bin file, open for reading."""

import os
import weakref
from pathlib import Path

from pretrain.errors import ConfigError


class TokenFile:
    """An open .bin file. Threads may read it at the same time.

    It is read, not mapped into memory: if a mapped file is truncated, the next access kills the process with SIGBUS. If
    the file is replaced by another one of the same name, the old one remains readable.
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

    def _read(self, start: int, num_bytes: int) -> bytes:
        try:
            return os.pread(self.descriptor, num_bytes, start)
        except OSError as error:
            error.filename = str(self.path)
            raise
