"""Copy of a checkpoint's files in host memory. A background process writes it to disk while training continues."""

import mmap
import os
from typing import NamedTuple

_GROWTH_BYTES = 1 << 26  # the memory grows by multiples of this size


class Region(NamedTuple):
    """Name and location of a file in the snapshot. Offset and length are in bytes."""

    name: str
    offset: int
    length: int


class Snapshot:
    """One rank's files of one checkpoint, stored one after another in anonymous shared memory (memfd_create(2)).

    The next snapshot reuses the memory. The writer process inherits `descriptor`, so it can still write the snapshot
    after the training process was killed.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ds-pretrain-snapshot", 0)
        os.ftruncate(self.descriptor, _GROWTH_BYTES)
        self._memory = mmap.mmap(self.descriptor, _GROWTH_BYTES)
        self.files: list[Region] = []
        self._end = 0

    def clear(self) -> None:
        """Remove the files, but keep the memory."""
        self.files, self._end = [], 0

    def open_file(self, name: str) -> "_SnapshotFile":
        """Open a file for writing in a `with` block. It is added to `files` at the end of the block."""
        return _SnapshotFile(self, name, self._end)

    def append(self, data: bytes | memoryview) -> int:
        """Append a copy of `data` and return its length in bytes."""
        with memoryview(data) as view, view.cast("B") as source:
            end = self._end + source.nbytes
            if end > len(self._memory):
                self._memory.resize(max(end, 2 * len(self._memory)) // _GROWTH_BYTES * _GROWTH_BYTES + _GROWTH_BYTES)
            self._memory[self._end:end] = source
            self._end = end
            return source.nbytes

    def close(self) -> None:
        """Release this process's mapping and descriptor."""
        self._memory.close()
        os.close(self.descriptor)

    @property
    def end(self) -> int:
        """Number of bytes in use."""
        return self._end


class _SnapshotFile:
    """A file in the snapshot, with the methods that `torch.save` calls."""

    def __init__(self, snapshot: Snapshot, name: str, start: int) -> None:
        self._snapshot, self._name, self._start = snapshot, name, start

    def write(self, data: bytes | memoryview) -> int:
        return self._snapshot.append(data)

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def __enter__(self) -> "_SnapshotFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._snapshot.files.append(Region(self._name, self._start, self._snapshot.end - self._start))
