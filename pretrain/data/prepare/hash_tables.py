"""Hash tables in files: of any entries, and the set of the digests of all documents, for exact duplicates.

A small table is mapped into memory; a large one is in the page cache alone.

Slots of a large one are read and written by system calls: faults of mapped pages took longer, as each maps 16 pages,
which must be unmapped again to limit this process's memory.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16
_SMALL_TABLE_BYTES = 32 << 20  # pages of a smaller table remain in this process's memory
_FIRST_SLOTS = 1 << 16
_BATCH = 1 << 10  # digests that are added at once

Digests = npt.NDArray[np.uint64]
"""[n, 2]"""
Words = npt.NDArray[np.uint64]
IsSame = Callable[[Words, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
"""(entries of the table [n, words], positions of the keys they are compared with [n]) -> whether the key is the same"""


class SlotTable:
    """Hash table with open addressing. An entry has `words` 64-bit words; its first is not 0: 0 marks an empty slot."""

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


class SeenDigests:
    """Set of the 128-bit digests of all documents so far. Its memory does not grow with the documents.

    `path` is the file of the table; `log` has the digests that were added so far, 16 bytes each, in order. The table
    can always be rebuilt from the log: after a kill, and to double it.
    """

    def __init__(self, path: Path, log: Path, *, num_logged: int, first_slots: int = _FIRST_SLOTS) -> None:
        self._log, self._count = log, 0
        self._table = SlotTable(path, DIGEST_BYTES // 8, slots_for(num_logged, first_slots))
        self._read_log(num_logged)

    def add(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Add digests. Return for each one whether it is new, that is, neither in the set nor earlier in `digests`.

        The caller appends the new ones to the log before the next call. Raises OSError if the disk is full.
        """
        slots = slots_for(self._count + len(digests), self._table.slots)
        if slots > self._table.slots:
            known, self._count = self._count, 0
            self._table.make(slots)
            self._read_log(known)
        parts = [self._add(digests[start : start + _BATCH]) for start in range(0, len(digests), _BATCH)]
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    def close(self) -> None:
        """Delete the table."""
        self._table.close()

    def _read_log(self, count: int) -> None:
        with self._log.open("rb") as file:
            for start in range(0, count, _BATCH):
                content = file.read(min(count - start, _BATCH) * DIGEST_BYTES)
                self._add(np.frombuffer(content, np.uint64).reshape(-1, 2))

    def _add(self, digests: Digests) -> npt.NDArray[np.bool_]:
        digests = digests.copy()
        digests[digests[:, 0] == 0, 0] = 1  # 0 marks an empty slot
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests remain in the order of occurrence
        ordered = digests[order]
        is_first = np.ones(len(digests), np.bool_)
        is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        candidates = order[is_first]
        is_new, distinct = np.zeros(len(digests), np.bool_), digests[candidates]
        is_new[candidates] = self._table.insert(distinct[:, 0], distinct,
                                                lambda found, keys: (found == distinct[keys]).all(axis=1))
        self._count += int(is_new.sum())
        return is_new
