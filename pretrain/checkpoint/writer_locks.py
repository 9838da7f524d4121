"""Which background writers are at work: each holds a lock on a file of the checkpoints folder until its process ends,
however it ends. A file server frees the locks of a host that fell silent.
"""

import errno
import fcntl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from pretrain.errors import ConfigError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what file systems say that have none
_POLL_S = 0.1


def _path(checkpoints: Path, rank: int | str) -> Path:
    return checkpoints / (f".writer-{rank}.lock" if isinstance(rank, str) else f".writer-{rank:05d}.lock")


def hold_lock(checkpoints: Path, rank: int) -> TextIO:
    """From now on, until the file is closed, this process is the writer of `rank`. Waits for an earlier one."""
    file = open(_path(checkpoints, rank), "a", encoding="utf-8")  # noqa: SIM115 (held until the end)
    _lock(file, fcntl.LOCK_EX)
    return file


def has_ended(checkpoints: Path, rank: int) -> bool:
    """Whether the rank's writer is certainly not at work; False where the file system has no locks."""
    return _is_free(_path(checkpoints, rank)) is True


def wait_for_writers(checkpoints: Path, *, timeout_s: float, ranks: Iterable[int] | None = None,
                     say: Callable[[str], None] = lambda line: None) -> None:
    """Let the writers of an earlier run, which may have been killed, end their work. Raises ConfigError."""
    busy = [_path(checkpoints, rank) for rank in ranks] if ranks is not None else list(
        checkpoints.glob(_path(checkpoints, "*").name))
    deadline = time.monotonic() + timeout_s
    if any(_is_free(path) is False for path in busy):
        say("waiting for a background writer of an earlier run")
    while busy := [path for path in busy if _is_free(path) is False]:
        if time.monotonic() > deadline:
            raise ConfigError(str(busy[0]), found="a background writer of an earlier run, still at work after "
                              f"{timeout_s:g} s", expected="none", remedy="wait, or end that process")
        time.sleep(_POLL_S)


def _is_free(path: Path) -> bool | None:
    """None where the file system cannot say."""
    try:
        with open(path, "r+", encoding="utf-8") as file:  # to be locked exclusively on NFS it must be writable
            return _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
