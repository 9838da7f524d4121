"""Set of the digests of all documents so far, for exact duplicates. Its memory does not grow with the documents.

The digests are in a file of 16 bytes per document, in order (the log). The set is a hash table with open addressing in
another file, which is mapped into memory. The table can always be rebuilt from the log: after a kill, and to double it.
"""

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16
_FIRST_SLOTS = 1 << 16
_BATCH = 1 << 10  # digests that are added at once: their pages of the table are in this process's memory
_SMALL_TABLE_BYTES = 32 << 20  # pages of a smaller table remain in this process's memory

Digests = npt.NDArray[np.uint64]
"""[n, 2]"""


class SeenDigests:
    """Set of 128-bit digests. `path` is the file of the table; `log` has the digests that were added so far."""

    def __init__(self, path: Path, log: Path, *, num_logged: int, first_slots: int = _FIRST_SLOTS) -> None:
        self._path, self._log, self._count = path, log, 0
        slots = first_slots
        while 2 * num_logged > slots:
            slots *= 2
        self._make_table(slots)
        self._read_log(num_logged)

    def add(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Add digests. Return for each one whether it is new, that is, neither in the set nor earlier in `digests`.

        The caller appends the new ones to the log before the next call. Raises OSError if the disk is full.
        """
        if 2 * (self._count + len(digests)) > self._slots:
            known = self._count
            self._make_table(2 * self._slots * -(-2 * len(digests) // self._slots or 1))
            self._read_log(known)
        parts = [self._add(digests[start : start + _BATCH]) for start in range(0, len(digests), _BATCH)]
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    def close(self) -> None:
        """Delete the table."""
        del self._table
        self._map.close()
        self._path.unlink(missing_ok=True)

    def _make_table(self, slots: int) -> None:
        """Replace the table by an empty one. Its disk space is reserved: a full disk would be a SIGBUS later."""
        if hasattr(self, "_table"):
            self.close()
        self._slots, self._count = slots, 0
        with self._path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, slots * DIGEST_BYTES)
            self._map = mmap.mmap(file.fileno(), slots * DIGEST_BYTES)
        self._table: Digests = np.frombuffer(self._map, np.uint64).reshape(-1, 2)  # a slot of zeros is empty

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
        is_new = np.zeros(len(digests), np.bool_)
        is_new[candidates] = self._insert(digests[candidates])
        self._count += int(is_new.sum())
        if self._slots * DIGEST_BYTES > _SMALL_TABLE_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)  # leave them to the page cache, which the kernel can shrink
        return is_new

    def _insert(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Insert distinct digests. Return for each one whether it was not in the table."""
        mask = np.uint64(self._slots - 1)
        slots = (digests[:, 0] & mask).astype(np.int64)
        is_new = np.zeros(len(digests), np.bool_)
        active = np.arange(len(digests))
        while active.size:
            found = self._table[slots[active]]
            is_empty = found[:, 0] == 0
            is_known = (found == digests[active]).all(axis=1)
            claims = active[is_empty]
            self._table[slots[claims]] = digests[claims]  # of several claims on a slot, one remains
            is_kept = (self._table[slots[claims]] == digests[claims]).all(axis=1)
            is_new[claims[is_kept]] = True
            active = np.concatenate([active[~is_empty & ~is_known], claims[~is_kept]])
            slots[active] = (slots[active] + 1) % self._slots
        return is_new
