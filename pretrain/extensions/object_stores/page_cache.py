"""A cache on the local disk for pages of token files in an object store. Imports no numpy.

It is one file of fixed size, FOLDER/pages, which all processes of a host read and write without locks:

    header of the file | 64 bytes for each slot: what is in it | the slots: 64 KiB each, one page of a token file

A page may lie in any of the 8 slots of one set, which follows from the file and the number of the page. A new page
replaces the oldest one of its set. The header of a slot names the version of the token file and the page, and has a
checksum of itself and of the page. A page counts only if all of this is right. Therefore a process that is killed while
it writes, two processes that write the same slot, and damage of the disk cost one more request, and never give wrong
tokens.
"""

import contextlib
import fcntl
import functools
import getpass
import hashlib
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.cli import say
from pretrain.errors import ConfigError, shorten
from pretrain.paths import check_folder

if TYPE_CHECKING:
    from pretrain.extensions.object_stores.extension import ObjectStores

PAGE_BYTES = 2**16
WAYS = 8  # slots of a set
_FILE_HEADER = struct.Struct("<8sIIQ")  # magic, bytes of a page, slots of a set, number of sets
_MAGIC = b"DSPAGES1"
_FILE_HEADER_BYTES = 4096
_SLOT = struct.Struct("<4sI16sQQ16s8x")  # magic, bytes of the page, token file, page, time (ns since 1970), checksum
_CHECKED = 40  # bytes of a slot's header before the checksum
_SLOT_MAGIC = b"page"
_SET_BYTES = WAYS * (_SLOT.size + PAGE_BYTES)
_LARGEST_DEFAULT = 10**12
_CLAIM_S, _POLL_S = 5.0, 0.01
_REPEAT_S = 60.0  # between two attempts to write, after one has failed
_CLAIMS_FROM = 2**61  # claims lock bytes far behind the end of the file


def cache_folder(given: str | None) -> Path:
    """Return the folder of the cache. `given`: the value of --data_cache."""
    if given:
        return Path(os.path.abspath(given))
    user = "~" if os.environ.get("HOME") != "" else f"~{getpass.getuser()}"  # expanduser takes "" for the folder /
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(f"{user}/.cache")
    return Path(home, "ds-pretrain", "data").absolute()


def open_cache(settings: "ObjectStores") -> "PageCache":
    """Return the cache of these settings, the same one for all token files of this process. Raises ConfigError."""
    return _opened(cache_folder(settings.data_cache), settings.data_cache_gb)


@functools.cache
def _opened(folder: Path, gigabytes: float | None) -> "PageCache":
    return PageCache(folder, None if gigabytes is None else int(gigabytes * 1e9))


class PageCache:
    """The open cache in a folder. `num_bytes`: its size; None: that of the existing one, or half of the free space.

    A cache of another size is replaced by an empty one; processes that have it open keep using it. Threads may use it
    at the same time. Raises ConfigError if the folder cannot be written.
    """

    def __init__(self, folder: Path, num_bytes: int | None = None) -> None:
        self.folder, self.path = folder, folder / "pages"
        self._failed_at: float | None = None
        self._lock = threading.Lock()
        check_folder(folder, "--data_cache")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with turn(folder):
                self._descriptor, self._num_sets = self._open(num_bytes)
        except OSError as error:
            raise ConfigError("--data_cache", problem=f"{shorten(str(folder))} cannot be used "
                              f"({error.strerror or error})", remedy="name a folder on a local disk, or set "
                              "XDG_CACHE_HOME, where the default folder lies") from None
        self.num_bytes = self._num_sets * WAYS * PAGE_BYTES

    def get(self, file_key: bytes, page: int) -> bytes | None:
        """Return a page of a token file; None if it is not here, or damaged. `file_key`: 16 bytes."""
        number = self._set_of(file_key, page)
        with contextlib.suppress(OSError):
            for way, header in enumerate(self._headers(number)):
                magic, length, key, found, _, checksum = _SLOT.unpack(header)
                if (magic, key, found) == (_SLOT_MAGIC, file_key, page) and length <= PAGE_BYTES:
                    data = os.pread(self._descriptor, length, self._page_offset(number, way))
                    if _checksum(header[:_CHECKED], data) == checksum:
                        return data
        return None

    def put(self, file_key: bytes, page: int, data: bytes) -> None:
        """Store a page, in place of the oldest one of its set. If the disk is full, nothing is stored."""
        if self._failed_at is not None and time.monotonic() - self._failed_at < _REPEAT_S:
            return
        number = self._set_of(file_key, page)
        header = _SLOT.pack(_SLOT_MAGIC, len(data), file_key, page, time.time_ns(), b"")[:_CHECKED]
        header += _checksum(header, data)
        try:
            way = min(enumerate(self._headers(number)), key=lambda item: _age(item[1], file_key, page))[0]
            _write(self._descriptor, data, self._page_offset(number, way))
            _write(self._descriptor, header.ljust(_SLOT.size, b"\0"), self._header_offset(number) + way * _SLOT.size)
        except OSError as error:
            with self._lock:  # several threads write at the same time
                is_first, self._failed_at = self._failed_at is None, time.monotonic()
            if is_first:
                say(f"the data cache {self.folder} cannot be written ({error.strerror or error}): what does not fit is "
                    "read from the store again when it is needed again. Nothing is lost")
        else:
            self._failed_at = None

    @contextlib.contextmanager
    def claim(self, file_key: bytes, page: int) -> Iterator[None]:
        """Wait until no other process of this host requests this page: the caller then looks again whether it is here.

        After 5 s it is requested twice, because the other process may be stopped.
        """
        word = hashlib.blake2b(file_key + page.to_bytes(8, "little"), digest_size=5).digest()
        place, end, holds = _CLAIMS_FROM + int.from_bytes(word, "little"), time.monotonic() + _CLAIM_S, False
        while not holds and time.monotonic() < end:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                holds = True
            except (BlockingIOError, PermissionError):
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        try:
            yield
        finally:
            if holds:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, place)

    def _open(self, num_bytes: int | None) -> tuple[int, int]:
        """Return the descriptor of the cache, created if there is none of this size, and its number of sets."""
        wanted = None if num_bytes is None else max(num_bytes // _SET_BYTES, 1)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            found = _sets_of(descriptor)
            if found and wanted in (None, found):
                return descriptor, found
            os.close(descriptor)
        status = os.statvfs(self.folder)
        free = status.f_bavail * status.f_frsize
        largest = free + _used_bytes(self.path)
        if num_bytes is not None and num_bytes > largest:
            raise ConfigError("--data_cache_gb", found=f"{num_bytes / 1e9:g}",
                              expected=f"at most {largest // 10**8 / 10:g}, the space of {shorten(str(self.folder))}",
                              remedy="or name a folder on another disk by --data_cache")
        sets = wanted or max(min(free // 2, _LARGEST_DEFAULT) // _SET_BYTES, 1)
        temporary = self.folder / f".pages.{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.ftruncate(descriptor, _FILE_HEADER_BYTES + sets * _SET_BYTES)  # the disk gives space when pages are written
        os.pwrite(descriptor, _FILE_HEADER.pack(_MAGIC, PAGE_BYTES, WAYS, sets), 0)
        os.replace(temporary, self.path)
        return descriptor, sets

    def _set_of(self, file_key: bytes, page: int) -> int:
        mixed = (int.from_bytes(file_key[:8], "little") ^ page) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        return (mixed ^ mixed >> 32) % self._num_sets

    def _headers(self, number: int) -> list[bytes]:
        """Return the headers of the slots of a set; empty ones where the file has become shorter. Raises OSError."""
        data = os.pread(self._descriptor, WAYS * _SLOT.size, self._header_offset(number))
        data = data.ljust(WAYS * _SLOT.size, b"\0")
        return [data[start:start + _SLOT.size] for start in range(0, len(data), _SLOT.size)]

    def _header_offset(self, number: int) -> int:
        return _FILE_HEADER_BYTES + number * WAYS * _SLOT.size

    def _page_offset(self, number: int, way: int) -> int:
        return self._header_offset(self._num_sets) + (number * WAYS + way) * PAGE_BYTES


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process of this host is in such a block with this folder. Raises OSError."""
    with open(folder / ".lock", "a") as file:
        with contextlib.suppress(OSError):  # a file system without locks: files are replaced atomically
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sets_of(descriptor: int) -> int:
    """Return the number of sets of a cache; 0 if it is none, or damaged."""
    header = os.pread(descriptor, _FILE_HEADER.size, 0)
    if len(header) < _FILE_HEADER.size:
        return 0
    magic, page_bytes, ways, sets = _FILE_HEADER.unpack(header)
    size = os.fstat(descriptor).st_size
    is_cache = (magic, page_bytes, ways) == (_MAGIC, PAGE_BYTES, WAYS)
    return int(sets) if is_cache and size == _FILE_HEADER_BYTES + sets * _SET_BYTES else 0


def _used_bytes(path: Path) -> int:
    """Return the bytes of the disk that a cache takes."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_blocks * 512
    return 0


def _age(header: bytes, file_key: bytes, page: int) -> int:
    """Return a number by which slots are compared: the lowest one is written. First the same page, then empty slots."""
    magic, _, key, found, written_ns, _ = _SLOT.unpack(header)
    if magic != _SLOT_MAGIC:
        return 1
    return 0 if (key, found) == (file_key, page) else 2 + int(written_ns)


def _checksum(header: bytes, data: bytes) -> bytes:
    return hashlib.sha256(header + data).digest()[:16]


def _write(descriptor: int, data: bytes, offset: int) -> None:
    count = os.pwrite(descriptor, data, offset)
    while count < len(data):  # a full disk: the next write raises the error
        count += os.pwrite(descriptor, data[count:], offset + count)
