"""The folder OUT.partial/: output that grows, and a state from which a preparation resumes after it was killed.

    tokens        the tokens of all documents, and of an incomplete last one
    lengths       int32 tokens of each document
    digests       16 bytes per document, if duplicates are counted
    blocks        32 bytes: SHA-256 of each complete block of `tokens`
    documents     of a shard: what a merge needs to know about each document (`Documents.rows`)
    NAME.step     the file of a step of an extension (`DocumentStep.file`)
    state.json    how many bytes of these files are valid, the position in the inputs, counts, settings

The state is replaced atomically after the files are on the disk. Bytes beyond it are cut off by a resume.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.data.token_files.writer import SHARD_ENDINGS
from pretrain.errors import ConfigError
from pretrain.paths import fsync, write_synced
from pretrain.stored_json import read_object

FILES = ("tokens", "lengths", "digests", "blocks")
DOCUMENTS = "documents"
_STATE, _LOCK = "state.json", "lock"
_VERSION = 3
_SECONDS_BETWEEN_STATES = 5.0
_LARGEST_COST = 0.05  # fraction of the time that saving states may take


class AppendFile:
    """A file that only grows. Bytes are in the file, though not yet on the disk, when `append` returns."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(self.descriptor).st_size < size:
            raise ConfigError(str(path), problem="it is shorter than its state", remedy="give --overwrite")
        self.cut(size)

    def append(self, content: "bytes | memoryview") -> None:
        view = memoryview(content).cast("B")
        while view:
            written = os.pwrite(self.descriptor, view, self.size)
            self.size += written
            view = view[written:]

    def cut(self, size: int) -> None:
        """Remove all bytes after `size`."""
        os.ftruncate(self.descriptor, size)
        self.size = size


class PartialOutput:
    """The open folder OUT.partial/. Only one process at a time can open it."""

    def __init__(self, out: str, state: dict[str, Any] | None, *, seconds_between_states: float | None = None,
                 more_files: Sequence[str] = ()) -> None:
        """`state`: what `read_state` returned; None begins a new folder, and deletes what is in an old one."""
        names = (*FILES, *more_files)
        self.path = partial_path(out)
        self._created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self._interval = _SECONDS_BETWEEN_STATES if seconds_between_states is None else seconds_between_states
        self._cost, self._saved = 0.0, time.monotonic()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_folder(self.path)
        if state is None:
            for path in self.path.iterdir():
                if path.name != _LOCK:
                    path.unlink()
        self._saved_sizes = sizes = state["sizes"] if state is not None else dict.fromkeys(names, 0)
        is_finished = state is not None and state["finished"]  # then some files may have been renamed
        self.files = {} if is_finished else {name: AppendFile(self.path / name, sizes[name]) for name in names}
        self.has_progress = state is not None

    @property
    def data_files(self) -> dict[str, Path]:
        """The name here of each file of the data set, by its ending."""
        names = {"bin": "tokens", "idx": "index"}
        return {ending: self.path / names.get(ending, ending) for ending in SHARD_ENDINGS}

    def saved_bytes(self, name: str) -> int:
        """Return how many bytes of a file the saved state needs."""
        return int(self._saved_sizes[name])

    def is_due(self) -> bool:
        """Return whether it is time to save the state."""
        waited = time.monotonic() - self._saved
        return waited >= max(self._interval, self._cost / _LARGEST_COST)

    def save(self, state: dict[str, Any]) -> None:
        """Commit all bytes so far, with `state`, which must be JSON values. Raises OSError."""
        started = time.monotonic()
        for file in self.files.values():
            os.fsync(file.descriptor)
        sizes = {name: file.size for name, file in self.files.items()}
        write_synced(self.path / "state.tmp", json.dumps({"version": _VERSION, "sizes": sizes, **state}).encode())
        os.replace(self.path / "state.tmp", self.path / _STATE)
        fsync(self.path)
        self._saved, self.has_progress = time.monotonic(), True
        self._cost, self._saved_sizes = self._saved - started, sizes

    def close(self) -> None:
        """Close the files. The folder remains, and can be resumed."""
        for file in self.files.values():
            os.close(file.descriptor)
        os.close(self._lock)
        self.files = {}

    def delete(self) -> None:
        """Delete the folder, and its parents that this object made and that are empty."""
        # The state is removed last: if this process is killed before, the next one deletes the rest.
        for path in sorted(self.path.iterdir(), key=lambda path: path.name == _STATE):
            path.unlink(missing_ok=True)
        self.path.rmdir()
        self.close()
        for folder in self._created:  # rmdir removes only empty folders
            with contextlib.suppress(OSError):
                folder.rmdir()


def partial_path(out: str) -> Path:
    return Path(f"{out}.partial").absolute()


def file_of_step(name: str) -> str:
    """Return the name of the file of a step of an extension."""
    return f"{name}.step"


def _stored(out: str) -> dict[str, Any]:
    try:
        return read_object(partial_path(out) / _STATE)
    except (OSError, ValueError):
        return {}


def read_state(out: str) -> dict[str, Any] | None:
    """Return the state of an earlier preparation that was stopped; None if there is none that can be resumed."""
    state = _stored(out)
    return state if state.get("version") == _VERSION else None


def is_of_other_version(out: str) -> bool:
    """Return whether another version of this program was stopped here, whose state this one cannot resume."""
    return _stored(out).get("version", _VERSION) != _VERSION


def _lock_folder(folder: Path) -> int:
    """Return the descriptor of the locked lock file. Raises ConfigError if another process has the lock."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise ConfigError(str(folder), problem="another process prepares the same data now",
                          remedy="wait for it, or give another --out") from None
    except OSError:  # a file system without locks
        pass
    return descriptor

