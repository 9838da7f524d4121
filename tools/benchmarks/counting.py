"""Count what one rank of many asks of a shared file system and of the other ranks, while real functions run.

The file system is a temporary folder: functions of `os` and `open` are replaced by functions that count and then do the
same. The other ranks are pretended: a collective gives this rank its own value for each of them, and the values of rank
0 that were recorded before. Nothing here measures time.
"""

import builtins
import contextlib
import io
import math
import os
import pathlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from pretrain.paths import FILE_THREADS

_KINDS = {
    "opens": ("open",), "lists": ("listdir", "scandir"), "stats": ("stat", "lstat", "access", "readlink", "statvfs"),
    "changes": ("mkdir", "rmdir", "rename", "replace", "unlink", "remove", "link", "symlink", "utime", "truncate",
                "chmod", "fsync")}
_MOVES_BYTES = {"read": "read_bytes", "pread": "read_bytes", "write": "written_bytes"}


@dataclass
class Counts:
    """What one rank has asked for."""

    opens: int = 0  # of files and folders, also of new ones
    lists: int = 0  # of a folder
    stats: int = 0  # questions about one name
    changes: int = 0  # new, renamed and removed names, and syncs
    threaded: int = 0  # of all these: operations that several threads do at the same time
    entries: int = 0  # names in the listings
    read_bytes: int = 0
    written_bytes: int = 0
    collectives: int = 0  # operations in which all ranks take part
    received_bytes: int = 0  # by this rank, in these operations
    messages: int = 0  # to other hosts, outside of collectives

    @property
    def operations(self) -> int:
        """Operations of the file system, without reading and writing of open files."""
        return self.opens + self.lists + self.stats + self.changes

    @property
    def waits(self) -> float:
        """Operations of the file system, one after another."""
        return self.operations - self.threaded * (1 - 1 / FILE_THREADS)


class _CountedFile(io.FileIO):
    """A file whose bytes are counted."""

    def __init__(self, counts: Counts, file: Any, mode: str, *, closefd: bool) -> None:
        super().__init__(file, mode, closefd=closefd)
        self._counts = counts

    def _read(self, data: bytes | None) -> bytes | None:
        self._counts.read_bytes += len(data or b"")
        return data

    def read(self, size: int | None = -1, /) -> Any:
        return self._read(super().read(-1 if size is None else size))

    def readall(self) -> Any:
        return self._read(super().readall())

    def readinto(self, buffer: Any, /) -> Any:
        count = super().readinto(buffer)
        self._counts.read_bytes += count or 0
        return count

    def write(self, data: Any, /) -> Any:
        count = super().write(data)
        self._counts.written_bytes += count or 0
        return count


@contextlib.contextmanager
def count_files(root: Path, counts: Counts) -> Iterator[None]:
    """Add the operations on files below `root` to `counts`, while the block runs."""
    prefix, lock = os.path.realpath(root), threading.Lock()
    original, listdir, readlink = builtins.open, os.listdir, os.readlink

    def is_shared(name: Any, dir_fd: int | None = None) -> bool:
        if dir_fd is not None or isinstance(name, int):
            name = readlink(f"/proc/self/fd/{name if dir_fd is None else dir_fd}")
        path = os.fspath(name)
        return os.path.abspath(path if isinstance(path, str) else path.decode()).startswith(prefix)

    def add(kind: str, number: int = 1) -> None:
        with lock:
            setattr(counts, kind, getattr(counts, kind) + number)
            if kind in _KINDS and threading.current_thread().name.startswith("files"):
                counts.threaded += number

    def counted(name: str, kind: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(path: Any = ".", *args: Any, **keywords: Any) -> Any:
            if is_shared(path, keywords.get("dir_fd") or keywords.get("src_dir_fd")):
                add(kind)
                if kind == "lists":
                    add("entries", len(listdir(path)))
            return function(path, *args, **keywords)

        return call

    def moving(name: str, kind: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(descriptor: int, *args: Any) -> Any:
            moved = function(descriptor, *args)
            if is_shared(descriptor):
                add(kind, moved if isinstance(moved, int) else len(moved))
            return moved

        return call

    def open_(file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
              newline: str | None = None, closefd: bool = True, opener: Any = None) -> Any:
        if opener is not None or not is_shared(file):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int):  # a descriptor was counted when it was opened
            add("opens")
        raw = _CountedFile(counts, file, mode.replace("b", "").replace("t", ""), closefd=closefd)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else \
            io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    with contextlib.ExitStack() as stack:
        for kind, names in _KINDS.items():
            for name in names:
                function = counted(name, kind)
                stack.enter_context(mock.patch.object(os, name, function))
                if hasattr(getattr(pathlib, "_NormalAccessor", None), name):  # Python 3.10 keeps functions of `os`
                    stack.enter_context(mock.patch.object(pathlib._NormalAccessor,  # type: ignore[attr-defined]
                                                          name, staticmethod(function)))
        for name, kind in _MOVES_BYTES.items():
            stack.enter_context(mock.patch.object(os, name, moving(name, kind)))
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", open_))
        yield


@dataclass
class PretendedRanks:
    """Stands for torch.distributed: this process is one rank after another, rank 0 first.

    Attributes:
        sent: what rank 0 has broadcast; the other ranks get it in the same order.
    """

    size: int
    rank: int = 0
    sent: list[list[Any]] = field(default_factory=list)
    _received: int = 0  # broadcasts of this rank so far
    _counts: Counts = field(default_factory=Counts)

    @property
    def rounds(self) -> int:
        """Messages of rank 0 in one collective operation, which uses a tree."""
        return math.ceil(math.log2(self.size))

    def _add(self, collectives: int, received_bytes: int) -> None:
        self._counts.collectives += collectives
        self._counts.received_bytes += received_bytes

    def all_reduce(self, tensor: Any, *_: Any, **__: Any) -> None:
        self._add(1, tensor.numel() * tensor.element_size())

    def all_gather(self, values: list[Any], own: Any, **_: Any) -> None:
        for value in values:
            value.copy_(own)
        self._add(1, self.size * own.numel() * own.element_size())

    def all_gather_object(self, values: list[Any], own: Any, **_: Any) -> None:
        values[:] = [own] * self.size
        self._add(2, self.size * (8 + len(pickle.dumps(own))))

    def broadcast_object_list(self, values: list[Any], src: int = 0, **_: Any) -> None:
        if self.rank == src:
            self.sent.append([*values])
        values[:] = self.sent[self._received]
        self._received += 1
        self._add(2, len(pickle.dumps(values)))

    def barrier(self, **_: Any) -> None:
        self._add(1, 0)

    @contextlib.contextmanager
    def as_rank(self, rank: int, counts: Counts) -> Iterator[None]:
        """Make this process the rank `rank` while the block runs, and add what it receives to `counts`."""
        self.rank, self._received, self._counts = rank, 0, counts
        replaced = {"get_rank": lambda *_: rank, "get_world_size": lambda *_: self.size, "is_initialized": lambda: True,
                    "get_process_group_ranks": lambda _: range(self.size),
                    **{name: getattr(self, name) for name in
                       ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "barrier")}}
        with contextlib.ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(mock.patch.object(dist, name, function))
            yield


@contextlib.contextmanager
def quick_clock(passed: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
    """Let `time.sleep` return at once while the block runs, after `passed` was called with the time by the clock."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        passed(now[0])

    with mock.patch.multiple(time, monotonic=lambda: now[0], sleep=sleep):
        yield
