"""Read a file of a store as if it was local. Blocks that follow are fetched by other threads.

So the network and the tokenization work at the same time. A compressed file, which can only be read from its beginning,
is copied to the disk while it is read: a resume reads the copy, and continues where it ends.
"""

import bisect
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from pretrain.errors import ConfigError
from pretrain.extensions.object_stores.remote_file import RemoteFile

BLOCK_BYTES = 2 << 20
_BLOCKS_AHEAD = 4
_FRAME = struct.Struct("<II")  # size and CRC-32 of a block of a copy
_Result = TypeVar("_Result")


def in_thread(function: Callable[[], _Result]) -> "Future[_Result]":
    """Call a function in a thread that does not keep this process alive, unlike those of concurrent.futures.

    A common DaemonThreads would not do: a forked process would wait for threads that it does not have.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class BlockReader:
    """A file of a store that is open for reading, with the methods that pyarrow needs."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._at = 0
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._blocks: dict[int, Future[bytes]] = {}
        self._num_read, self._last = 0, -1  # blocks so far, and the last one
        self.closed = False

    @property
    def name(self) -> str:
        return self._file.name

    @property
    def size(self) -> int:
        return self._file.size

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ahead in these ranges of bytes, in their order in the file. Other bytes are fetched when they are read.

        The first block is requested at once.
        """
        blocks = sorted((begin, min(begin + BLOCK_BYTES, stop)) for start, stop in ranges
                        for begin in range(start, stop, BLOCK_BYTES))
        starts, stops = [start for start, _ in blocks], [stop for _, stop in blocks]
        if (starts, stops) != (self._starts, self._stops):
            self._starts, self._stops = starts, stops
            self._blocks.clear()
        if starts and not self._blocks:
            self._fetch(0)

    def check_version(self) -> None:
        """Raise ConfigError if the store has another version now."""
        self._file.check_version()

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes (-1: all); fewer at the end of the file. Raises ConfigError."""
        stop = self._file.size if size is None or size < 0 else min(self._at + size, self._file.size)
        parts = []
        while self._at < stop:
            parts.append(self._part(stop))
            self._at += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, stop: int) -> bytes:
        """Return bytes from the current position on, up to `stop`: the rest of a block, or what no block has."""
        index = bisect.bisect_right(self._starts, self._at) - 1
        if index < 0 or self._at >= self._stops[index]:
            following = self._starts[index + 1] if index + 1 < len(self._starts) else stop
            return self._file.read(self._at, min(stop, following) - self._at)
        start = self._starts[index]
        return self._block(index)[self._at - start : stop - start]

    def _block(self, index: int) -> bytes:
        if index != self._last:
            self._num_read, self._last = self._num_read + 1, index
        for number in [number for number in self._blocks if number < index]:
            del self._blocks[number]
        ahead = min(self._num_read, _BLOCKS_AHEAD)  # few at first: perhaps only the beginning is read
        for number in range(index, min(index + 1 + ahead, len(self._starts))):
            if number not in self._blocks:
                self._fetch(number)
        return self._blocks[index].result()

    def _fetch(self, number: int) -> None:
        start, size = self._starts[number], self._stops[number] - self._starts[number]
        self._blocks[number] = in_thread(lambda: self._file.read(start, size))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._blocks.clear()
        self.closed = True


class CopiedReader:
    """A file of a store that is read once, from its beginning to its end, and copied to the disk meanwhile.

    The copy consists of blocks with a checksum each. What follows a block that is not valid, because this machine was
    switched off, is fetched again.
    """

    def __init__(self, reader: BlockReader, copy: Path) -> None:
        self._reader, self._copy = reader, copy
        self._descriptor = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._at_in_copy = 0
        self._reads_copy = True
        self._at = 0  # in the file: end of the current block
        self._block = memoryview(b"")

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the first block now, unless the copy has it."""
        if not os.fstat(self._descriptor).st_size:
            self._reader.expect(ranges)

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes (-1: all); fewer at the end of the file. Raises ConfigError."""
        parts, missing = [], self._reader.size if size is None or size < 0 else size
        while missing > 0 and (self._block or self._next_block()):
            parts.append(self._block[:missing])
            self._block = self._block[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def _next_block(self) -> bool:
        """Read the next block: from the copy, or else from the store. Return whether there is one."""
        data = self._copied_block() if self._reads_copy else b""
        if not data and self._reads_copy:
            self._reads_copy = False
            self._reader.seek(self._at)
            self._reader.expect([(self._at, self._reader.size)])
        if not data:
            data = self._reader.read(BLOCK_BYTES)
            try:
                self._append(data)
            except OSError as error:
                raise ConfigError(str(self._copy), problem=f"{self._reader.name} cannot be copied: {error.strerror}",
                                  remedy="remove the reason, and give the same command again") from None
        self._at += len(data)
        self._block = memoryview(data)
        return bool(data)

    def _copied_block(self) -> bytes:
        header = os.pread(self._descriptor, _FRAME.size, self._at_in_copy)
        if len(header) < _FRAME.size:
            return b""
        size, checksum = _FRAME.unpack(header)
        data = os.pread(self._descriptor, min(size, BLOCK_BYTES), self._at_in_copy + _FRAME.size)
        if len(data) != size or zlib.crc32(data) != checksum:
            return b""
        self._at_in_copy += _FRAME.size + size
        return data

    def _append(self, data: bytes) -> None:
        if data:
            os.ftruncate(self._descriptor, self._at_in_copy)
            frame = memoryview(_FRAME.pack(len(data), zlib.crc32(data)) + data)
            while frame:
                written = os.pwrite(self._descriptor, frame, self._at_in_copy)
                self._at_in_copy += written
                frame = frame[written:]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._reader.close()
