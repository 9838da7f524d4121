"""Start and read the process that hashes a .bin file while a run trains."""

import os
import subprocess
import sys

from pretrain.data.files.token_file import TokenFile
from pretrain.distributed.process import package_environment


class BackgroundHash:
    """A process that hashes the blocks [first, num_blocks) of a file. No method waits for it."""

    def __init__(self, file: TokenFile, *, first: int, num_blocks: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pretrain.data.files.hash_worker", str(file.descriptor), str(first),
             str(num_blocks)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[file.descriptor],
            env=package_environment())
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._unread = b""

    def read(self) -> list[str]:
        """Return the hashes of the blocks that were finished since the last call."""
        try:
            while part := os.read(self._output, 2**16):
                self._unread += part
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        return [line.split()[1].decode() for line in lines]

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. The hashes that it printed last may still be unread."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
