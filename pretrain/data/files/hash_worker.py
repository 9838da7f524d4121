"""Hash the blocks of a .bin file in a process of low priority, next to a training run.

    python -m pretrain.data.files.hash_worker DESCRIPTOR FIRST_BLOCK NUM_BLOCKS [DESCRIPTOR_OF_THE_IDX]

It prints one line per block: its number and its SHA-256. If it hashes an .idx, this line comes first: idx and its
SHA-256. It ends when its stdin is closed, also if the training process was killed. A thread of the training process
would compete for the GIL; a preempted thread that holds the GIL would stop the training.
"""

import contextlib
import os
import select
import signal
import sys
import time

from pretrain.data.files.hashes import hash_block, hash_file


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
