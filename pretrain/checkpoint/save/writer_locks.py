"""Which background writers are at work: each holds a lock on a file of the checkpoints folder until its last save is
committed, or its process ends, however it ends. A file server frees the locks of a host that fell silent.

Some file systems have no locks, or only such as the same host sees (BeeGFS and Lustre, as they are often mounted):
time-outs do there what locks do elsewhere.
"""

import errno
import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pretrain.errors import SaveError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what file systems say that have none
_POLL_S = 0.1


def _path(checkpoints: Path, rank: int | str) -> Path:
    return checkpoints / (f".writer-{rank}.lock" if isinstance(rank, str) else f".writer-{rank:05d}.lock")


def hold_lock(checkpoints: Path, rank: int) -> TextIO:
    """From now on, until the file is closed, this process saves for `rank`. Waits for an earlier one."""
    file = open(_path(checkpoints, rank), "a", encoding="utf-8")  # noqa: SIM115 (held until the end)
    _lock(file, fcntl.LOCK_EX)
    return file


def has_ended(checkpoints: Path, rank: int) -> bool:
    """Whether nobody saves for the rank. False where there are no locks, wrong where they are a host's own."""
    path = _path(checkpoints, rank)
    return path.exists() and _is_free(path) is True


def wait_for_writers(checkpoints: Path, *, timeout_s: float, say: Callable[[str], None] = lambda _: None) -> None:
    """Let the writers of an earlier run, which may have been killed, end their saves. Raises SaveError."""
    busy = list(checkpoints.glob(_path(checkpoints, "*").name))
    deadline = time.monotonic() + timeout_s
    if any(_is_free(path) is False for path in busy):
        say("waiting for a background writer of an earlier run")
    while busy := [path for path in busy if _is_free(path) is False]:
        if time.monotonic() > deadline:
            raise SaveError(f"{busy[0]}: a background writer of an earlier run is still saving after {timeout_s:g} s")
        time.sleep(_POLL_S)


def _is_free(path: Path) -> bool | None:
    """None where the file system cannot say."""
    try:
        with open(path, encoding="utf-8") as file:  # shared: those who ask do not see one another
            return _lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True


def _lock(file: TextIO, how: int) -> bool | None:
    """True: taken; None: the file system has no locks. Raises OSError, BlockingIOError where another one has it."""
    try:
        fcntl.flock(file.fileno(), how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
