"""Set of the digests of all documents so far, for exact duplicates. Its memory does not grow with the documents.

The digests are in a file of 16 bytes per document, in order (the log). The set is a hash table in another file. The
table can always be rebuilt from the log: after a kill, and to double it.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.duplicates.slot_table import SlotTable, slots_for

DIGEST_BYTES = 16
_FIRST_SLOTS = 1 << 16
_BATCH = 1 << 10  # digests that are added at once

Digests = npt.NDArray[np.uint64]
"""[n, 2]"""


class SeenDigests:
    """Set of 128-bit digests. `path` is the file of the table; `log` has the digests that were added so far."""

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
