"""Files in host memory, which a background process writes to the disk while training goes on."""

import mmap
import os
from typing import NamedTuple

_GROWTH = 1 << 26  # bytes; memory that is there already is not asked for again at the next save


class Region(NamedTuple):
    """Where a file lies in the snapshot, in bytes."""

    name: str
    offset: int
    length: int


class Snapshot:
    """One rank's files of one checkpoint, one after another in anonymous shared memory (memfd_create(2)).

    The memory is kept for the next snapshot. It belongs to every process that holds `descriptor`, so what a killed
    training process leaves can still be written.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ds-pretrain-snapshot", 0)
        os.ftruncate(self.descriptor, _GROWTH)
        self._memory = mmap.mmap(self.descriptor, _GROWTH)
        self.files: list[Region] = []
        self._end = 0

    def clear(self) -> None:
        """Forget the files, keep the memory."""
        self.files, self._end = [], 0

    def open_file(self, name: str) -> "_SnapshotFile":
        """A file for writing, to be used in a `with` block; it counts at its end."""
        return _SnapshotFile(self, name, self._end)

    def append(self, data: bytes | memoryview) -> int:
        """Copy `data` behind what is there. Returns its length in bytes."""
        with memoryview(data) as view, view.cast("B") as source:
            end = self._end + source.nbytes
            if end > len(self._memory):
                self._memory.resize(max(end, 2 * len(self._memory)) // _GROWTH * _GROWTH + _GROWTH)
            self._memory[self._end:end] = source
            self._end = end
            return source.nbytes

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)

    @property
    def end(self) -> int:
        """Bytes in use."""
        return self._end


class _SnapshotFile:
    """Enough of a file for `torch.save`."""

    def __init__(self, snapshot: Snapshot, name: str, start: int) -> None:
        self._snapshot, self._name, self._start = snapshot, name, start

    def write(self, data: bytes | memoryview) -> int:
        return self._snapshot.append(data)

    def flush(self) -> None:
        """Nothing waits."""

    def __enter__(self) -> "_SnapshotFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._snapshot.files.append(Region(self._name, self._start, self._snapshot.end - self._start))
