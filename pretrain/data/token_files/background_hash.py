"""Hash a .bin file in a process of low priority, next to a training run.

    python -m pretrain.data.token_files.background_hash DESCRIPTOR FIRST_BLOCK NUM_BLOCKS [DESCRIPTOR_OF_THE_IDX]

The process prints one line per block: its number and its SHA-256. If it hashes an .idx, this line comes first: idx and
its SHA-256. It ends when its stdin is closed, also if the training process was killed. A thread of the training process
would compete for the GIL; a preempted thread that holds the GIL would stop the training.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from pretrain.data.token_files.hashes import hash_block, hash_file
from pretrain.distributed.process import package_environment

if TYPE_CHECKING:  # numpy would cost the process that hashes 30 MB
    from pretrain.data.token_files.token_file import TokenFile


class BackgroundHash:
    """A process that hashes `index`, if it is given, and the blocks [first, num_blocks) of `file`.

    No method waits for it. `idx_sha256` is the hash of `index` from the first block on, and "" before.
    """

    def __init__(self, file: "TokenFile", *, first: int, num_blocks: int, index: "TokenFile | None" = None) -> None:
        descriptors = [file.descriptor] if index is None else [file.descriptor, index.descriptor]
        self.idx_sha256 = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pretrain.data.token_files.background_hash", str(file.descriptor), str(first),
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


def main() -> None:
    # sent to all processes of the run
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, first, num_blocks, *index = map(int, sys.argv[1:])
    _lower_priority()
    pause = _Pause()
    for idx_descriptor in index:
        print("idx", hash_file(idx_descriptor, after_chunk=pause), flush=True)
    for block in range(first, num_blocks):
        print(block, hash_block(descriptor, block, after_chunk=pause), flush=True)


def _lower_priority() -> None:
    """Let the kernel run this process only when the training processes leave a core idle.

    Where Linux groups the processes of each session (sched_autogroup), a priority counts only within the session.
    Therefore the training process starts this one in its own session.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class _Pause:
    """Waits after each chunk for as long as the chunk took, so that at most half of a core and disk is used."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> None:
        if select.select([sys.stdin], [], [], time.monotonic() - self._start)[0]:
            sys.exit()
        self._start = time.monotonic()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
