"""Output files: names of those that control a run, checks that they can be written, and durable writes.

The checks come at the start, so that hours of work are not lost at the end.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pretrain.errors import ConfigError, file_errors, shorten

STOP_FILE = "STOP"  # in the run folder: the run saves and stops, and is not started again while the file exists
SAVE_FILE = "SAVE"  # in the run folder: the run saves a checkpoint, then removes the file
RUN_FILES = ("run.json", "metrics.jsonl", "events.jsonl", "rollbacks.jsonl")  # in the run folder: a run writes them
PROFILES_FOLDER = "profiles"  # in the run folder: outputs of profilers

_MANY_FILES, FILE_THREADS = 64, 16  # `for_each_file`
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def check_no_stop_file(run: Path) -> None:
    """Raise ConfigError if the run folder has a file STOP."""
    path = run / STOP_FILE
    if os.path.lexists(path):
        raise ConfigError(shorten(str(path)), problem="this file stops the run", remedy=f"rm {shorten(str(path))}")


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's. Other programs, too, write files called run.json."""
    has_record = (folder / "run.json").is_file() and (folder / "events.jsonl").is_file()
    return has_record or any(folder.glob("checkpoints/global_step*"))


def check_outside_runs(save: Path, where: str) -> None:
    """Raise ConfigError if a run folder would lie in the run folder of another run, or be its checkpoints folder."""
    path = Path(os.path.realpath(save))
    for folder in () if _is_run(path) else path.parents:  # a run that exists continues, wherever it lies
        if _is_run(folder):
            raise ConfigError(where, problem=f"{shorten(str(path))} lies in the run folder {shorten(str(folder))}",
                              remedy="choose a folder outside of other runs")
    if any(path.glob("global_step*/manifest.json")):
        raise ConfigError(where, problem=f"{shorten(str(path))} is the folder of a run's checkpoints",
                          remedy="name the run folder, which holds the folder checkpoints")


def _check_outside_checkpoints(path: Path, where: str, *, is_new: bool) -> None:
    """Raise ConfigError if an output would be written into a checkpoint, which would then count as damaged."""
    real = Path(os.path.realpath(path))
    for folder in (*real.parents, *(() if is_new else (real,))):
        if folder.name.startswith("global_step") and (folder / "manifest.json").is_file():
            raise ConfigError(where, problem=f"{shorten(str(path))} lies in the checkpoint {shorten(str(folder))}",
                              remedy="choose a folder outside of checkpoints")


def check_folder(path: Path, where: str, *, is_new: bool = False) -> None:
    """Raise ConfigError if the folder `path` cannot be created or written to, or lies in a checkpoint.

    Creates and removes a temporary folder in the nearest existing parent. A check of permissions is not enough: root
    passes every such check, but cannot write to /proc or a read-only file system.

    Args:
        is_new: the caller writes `path` as a whole; it may be a new checkpoint itself.
    """
    path = path.absolute()
    _check_outside_checkpoints(path, where, is_new=is_new)
    with file_errors(where, f"{shorten(str(path))} cannot be written to ({{}})",
                     "choose a folder that can be created and written to"):
        folder = path
        while not os.path.lexists(folder):  # lexists: mkdir fails on a dangling link
            folder = folder.parent
        if not folder.is_dir():
            raise ConfigError(where, problem=f"{shorten(str(path))} cannot be made: {shorten(str(folder))} is a file")
        longest = os.pathconf(folder, "PC_NAME_MAX") - len(".tmp-")
        if any(len(os.fsencode(part)) > longest for part in path.parts[len(folder.parts):]):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.rmdir(tempfile.mkdtemp(prefix=".ds-pretrain-", dir=folder))


def free_bytes(folder: Path) -> int:
    """Return the free bytes for this user in the file system of `folder`, or of its nearest existing parent."""
    status = os.statvfs(_nearest_existing(folder))
    return status.f_bavail * status.f_frsize


def _nearest_existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def check_space(path: Path, where: str, num_bytes: int) -> None:
    """Raise ConfigError if the disk of a new file `path` has less than `num_bytes` free."""
    folder = _nearest_existing(path.absolute().parent)
    free = free_bytes(folder)
    if free < num_bytes:
        raise ConfigError(where, problem=f"{folder} has {free / 1e9:,.1f} GB free, and {num_bytes / 1e9:,.1f} GB are "
                          "needed", remedy="choose another folder")


def check_file(path: Path, where: str) -> None:
    """Raise ConfigError unless `path` is a writable file, or a new file in an existing folder."""
    with file_errors(where, f"{shorten(str(path))} cannot be written to ({{}})"):
        if path.is_dir():
            raise ConfigError(where, problem=f"{shorten(str(path))} is a folder, not a file")
        if not path.absolute().parent.is_dir():
            raise ConfigError(where, problem=f"there is no folder {shorten(str(path.absolute().parent))}",
                              remedy="make it first")
        if path.exists():
            with path.open("a"):
                return
    check_folder(path, where)


def for_each_file(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return `function(item)` for each item, in order. Many items are divided among threads.

    The function asks the file system once or twice. A file server takes about a millisecond for an answer: one after
    another, the answers for the files of a thousand ranks would take seconds.
    """
    if len(items) < _MANY_FILES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="files") as pool:
        return list(pool.map(function, items))


def status_of(path: os.PathLike[str]) -> os.stat_result | None:
    """Return the status of a file; None if there is no such file, or if a file server does not answer."""
    with contextlib.suppress(OSError):
        return os.stat(path)
    return None


def text_of(path: Path) -> str:
    """Return the content of a file of the system, such as /proc/cpuinfo; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk, where it survives a crash of the machine. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def writing(where: str, remedy: str = "") -> contextlib.AbstractContextManager[None]:
    """Raise ConfigError for an OSError of a block that writes files, for example if the disk is full."""
    return file_errors(where, "the files cannot be written: {}", remedy)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a new file, and give it the name `path`. Several processes may do so. Raises OSError."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Sync a file, or the directory entries of a folder, to disk. Another process may have written them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)  # EBADF: of a folder on NFS


def lock(descriptor: int, operation: int) -> bool | None:
    """Lock an open file or folder by flock(2), and return True. The kernel releases the lock when it is closed.

    Returns False if another process holds the lock, and None if the file system has no locks. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def make_folder(path: Path) -> Path:
    """Create the folder if needed, and return it. Raises ConfigError if it cannot be created or written."""
    with file_errors(path, "this folder cannot be created: {}"):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise ConfigError(str(path), problem="you may not write to this folder")
    return path
