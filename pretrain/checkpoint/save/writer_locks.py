"""Lock files that show which background writers are running.

Each writer locks a file in the checkpoints folder until its last save is committed or its process ends for any reason.
A file server releases the locks of a host that stops responding. Some file systems have no locks. On others (BeeGFS and
Lustre with common mount options) only processes of the same host see a lock. In both cases time-outs replace the locks.
"""

import errno
import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pretrain.errors import SaveError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems without locks
_POLL_S = 0.1


def _path(checkpoints: Path, rank: int | str) -> Path:
    """Return the path of a rank's lock file; rank "*" gives a pattern for all ranks."""
    return checkpoints / (f".writer-{rank}.lock" if isinstance(rank, str) else f".writer-{rank:05d}.lock")


def hold_lock(checkpoints: Path, rank: int) -> TextIO:
    """Lock the file of `rank`'s writer until the returned file is closed. Waits for an earlier run's writer."""
    file = open(_path(checkpoints, rank), "a", encoding="utf-8")  # noqa: SIM115 (the open file holds the lock)
    _lock(file, fcntl.LOCK_EX)
    return file


def has_ended(checkpoints: Path, rank: int) -> bool:
    """Return whether the writer of `rank` has ended.

    The result is False on file systems without locks. It is wrong for another host's writer on file systems where only
    processes of the same host see a lock; callers check `SaveJob.locks_are_shared`.
    """
    path = _path(checkpoints, rank)
    return path.exists() and _is_free(path) is True


def wait_for_writers(checkpoints: Path, *, timeout_s: float, log: Callable[[str], None] = lambda _: None) -> None:
    """Wait until the writers of an earlier run, which may have been killed, have finished their saves.

    Raises SaveError after `timeout_s` seconds.
    """
    busy = list(checkpoints.glob(_path(checkpoints, "*").name))
    deadline = time.monotonic() + timeout_s
    if any(_is_free(path) is False for path in busy):
        log("waiting for a background writer of an earlier run")
    while busy := [path for path in busy if _is_free(path) is False]:
        if time.monotonic() > deadline:
            raise SaveError(f"{busy[0]}: a background writer of an earlier run is still saving after {timeout_s:g} s")
        time.sleep(_POLL_S)


def _is_free(path: Path) -> bool | None:
    """Return whether the lock is free; None if the file system has no locks."""
    try:
        with open(path, encoding="utf-8") as file:  # with a shared lock several processes can check
            return _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True


def _lock(file: TextIO, operation: int) -> bool | None:
    """Take the lock and return True; None if the file system has no locks.

    Raises BlockingIOError if another process holds the lock, and other OSErrors.
    """
    try:
        fcntl.flock(file.fileno(), operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
