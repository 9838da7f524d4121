"""Start and read the process that hashes a .bin file while a run trains."""

import os
import subprocess
import sys

from pretrain.data.files.token_file import TokenFile
from pretrain.distributed.process import package_environment


class BackgroundHash:
    """A process that hashes `index`, if it is given, and the blocks [first, num_blocks) of `file`.

    No method waits for it. `idx_sha256` is the hash of `index` from the first block on, and "" before.
    """

    def __init__(self, file: TokenFile, *, first: int, num_blocks: int, index: TokenFile | None = None) -> None:
        descriptors = [file.descriptor] if index is None else [file.descriptor, index.descriptor]
        self.idx_sha256 = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pretrain.data.files.hash_worker", str(file.descriptor), str(first),
             str(num_blocks), *map(str, descriptors[1:])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=descriptors,
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
        words = [line.decode().split() for line in lines]
        self.idx_sha256 = next((digest for number, digest in words if number == "idx"), self.idx_sha256)
        return [digest for number, digest in words if number != "idx"]

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. The hashes that it printed last may still be unread."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
