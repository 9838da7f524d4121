"""Files that are hashed while they are written, and writes that a power cut cannot leave half done. Linux, no torch."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_SMALL_BYTES = 2**16  # smaller pieces are collected: the hand-over to the hashing thread would cost more than the hash
_CHUNK_BYTES = 2**24  # of large pieces: hashed and written side by side while they are in the cache


@dataclass(frozen=True)
class FileRecord:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str  # hexadecimal


class HashedFile:
    """A new file, open for writing bytes, that knows its SHA-256 when it is closed; enough of a file for `torch.save`.

    One thread hashes what another writes. A piece is not kept after `write` has returned, so the caller may change it.
    The file must not exist: two writers of one name would make a file that neither has hashed.
    After an error (ENOSPC, say) the file takes no more bytes, and `close` raises that error, so that it cannot be lost
    where a library swallows it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._digest, self._bytes, self._pending = hashlib.sha256(), 0, bytearray()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._error: OSError | None = None
        self._record: FileRecord | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`; its length in bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        self._raise_earlier_error()
        if len(view) < _SMALL_BYTES:
            self._pending += view
            if len(self._pending) >= _SMALL_BYTES:
                self._write_pending()
        else:
            self._write_pending()
            for start in range(0, len(view), _CHUNK_BYTES):
                self._write_and_hash(view[start:start + _CHUNK_BYTES])
        return len(view)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._raise_earlier_error()
        self._write_pending()

    def close(self) -> FileRecord:
        """Bring the file to the disk; its size and hash. A second call returns the same. Raises OSError."""
        if self._record is None:
            try:
                self.flush()
                self._fsync()
            finally:
                self._release()
            self._record = FileRecord(self._bytes, self._digest.hexdigest())
        return self._record

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        self._release()
        self._raise_earlier_error()  # torch.save turns a full disk into an error of its own
        self._error = OSError(f"{self.path} was given up")

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, bytearray()
        if pending:
            self._write_and_hash(memoryview(pending))

    def _write_and_hash(self, view: memoryview) -> None:
        hashed = self._hasher.submit(self._digest.update, view)
        try:
            written = 0
            while written < len(view):
                written += os.write(self._descriptor, view[written:])
        except OSError as error:
            self._error = error
            raise
        finally:
            hashed.result()
        self._bytes += len(view)

    def _fsync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._error = error
            raise

    def _raise_earlier_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _release(self) -> None:
        self._hasher.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sha256_of(path: Path) -> str:
    """Of the file's content, in hexadecimal; read in pieces. Raises OSError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file: whoever reads it, even after a power cut, finds the old text or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Bring a file, or the list of names of a folder, to the disk, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write to the file system of `folder`, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
