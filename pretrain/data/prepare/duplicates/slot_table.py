"""Hash table with open addressing in a file. A small one is mapped into memory; a large one is in the page cache alone.

Slots of a large one are read and written by system calls: faults of mapped pages took longer, as each maps 16 pages,
which must be unmapped again to limit this process's memory.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

_SMALL_TABLE_BYTES = 32 << 20  # pages of a smaller table remain in this process's memory

Words = npt.NDArray[np.uint64]
IsSame = Callable[[Words, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
"""(entries of the table [n, words], positions of the keys they are compared with [n]) -> whether the key is the same"""


class SlotTable:
    """Table of entries of `words` 64-bit words each. The first word of an entry is not 0, which marks an empty slot."""

    def __init__(self, path: Path, words: int, slots: int) -> None:
        self._path, self._words = path, words
        self.make(slots)

    def make(self, slots: int) -> None:
        """Replace the table by an empty one. Its disk space is reserved: a full disk would be a SIGBUS later."""
        if hasattr(self, "_table"):
            self.close()
        self.slots, num_bytes = slots, slots * self._words * 8
        self._file = self._path.open("w+b")
        os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        self._map = mmap.mmap(self._file.fileno(), num_bytes)
        self._table: Words = np.frombuffer(self._map, np.uint64).reshape(slots, self._words)

    def find(self, hashes: Words, is_same: IsSame) -> Words:
        """Return the entry of each key, zeros if there is none. The low bits of a key's hash choose its first slot."""
        entries = np.zeros((len(hashes), self._words), np.uint64)
        slots = self._first_slots(hashes)
        keys = np.arange(len(hashes))
        while keys.size:
            found = self._read(slots[keys])
            is_used = found[:, 0] != 0
            keys, found = keys[is_used], found[is_used]
            is_known = is_same(found, keys)
            entries[keys[is_known]] = found[is_known]
            keys = keys[~is_known]
            slots[keys] = (slots[keys] + 1) % self.slots
        return entries

    def insert(self, hashes: Words, entries: Words, is_same: IsSame) -> npt.NDArray[np.bool_]:
        """Insert entries of distinct keys. Return for each one whether its key was not in the table."""
        is_new = np.zeros(len(hashes), np.bool_)
        slots = self._first_slots(hashes)
        keys = np.arange(len(hashes))
        while keys.size:
            found = self._read(slots[keys])
            is_empty = found[:, 0] == 0
            is_known = is_same(found, keys)
            claims = keys[is_empty]
            first = np.unique(slots[claims], return_index=True)[1]  # one key gets a slot that several claim
            self._write(slots[claims[first]], entries[claims[first]])
            is_new[claims[first]] = True
            keys = np.concatenate([keys[~is_empty & ~is_known], np.delete(claims, first)])
            slots[keys] = (slots[keys] + 1) % self.slots
        return is_new

    def _read(self, slots: npt.NDArray[np.int64]) -> Words:
        if not self._is_large:
            return self._table[slots]
        size, descriptor = 8 * self._words, self._file.fileno()
        content = b"".join([os.pread(descriptor, size, slot * size) for slot in slots.tolist()])
        return np.frombuffer(content, np.uint64).reshape(-1, self._words)

    def _write(self, slots: npt.NDArray[np.int64], entries: Words) -> None:
        if not self._is_large:
            self._table[slots] = entries
            return
        size, descriptor = 8 * self._words, self._file.fileno()
        for slot, entry in zip(slots.tolist(), entries, strict=True):
            os.pwrite(descriptor, entry.tobytes(), slot * size)

    @property
    def _is_large(self) -> bool:
        """True if the pages would need too much of this process's memory, so that slots are read one by one."""
        return len(self._map) > _SMALL_TABLE_BYTES

    def _first_slots(self, hashes: Words) -> npt.NDArray[np.int64]:
        return (hashes & np.uint64(self.slots - 1)).astype(np.int64)

    def close(self) -> None:
        """Delete the table."""
        del self._table
        self._map.close()
        self._file.close()
        self._path.unlink(missing_ok=True)


def slots_for(count: int, slots: int) -> int:
    """Return `slots`, a power of 2, or the smallest larger one such that `count` entries fill at most half of them."""
    return max(slots, 1 << max(2 * count - 1, 0).bit_length())
