"""Near-duplicates among all documents so far: locality-sensitive hashing (LSH) of MinHash signatures.

A document is a near-duplicate if the estimated Jaccard similarity to an earlier document, which is none itself, reaches
the threshold. A signature is divided into bands of consecutive values. For each content of a band, a table has the
first document with it; only these documents are compared. Signatures are in a file, in order, and the table in another
one, which can always be rebuilt from the first: after a kill, and to double it.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_step import ORIGIN, Origins
from pretrain.data.prepare.hash_tables import SlotTable, slots_for
from pretrain.data.prepare.partial_output import AppendFile
from pretrain.data.samples.shuffled import finalize
from pretrain.extensions.near_duplicates.signatures import NUM_VALUES

RECORD = np.dtype([("origins", ORIGIN), ("signatures", "<u2", (NUM_VALUES,))])
"""what is kept of a document"""
_LEAST_RECALL = 0.95
_FIRST_SLOTS = 1 << 16
_BATCH = 1 << 10  # documents that are added at once
_ROW_BITS, _TAG_BITS = np.uint64(32), np.uint64(0xFFFFFFFF00000000)  # an entry: half of a band's hash | row + 1

Records = npt.NDArray[np.void]
_Hashes = npt.NDArray[np.uint64]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NearDuplicate:
    """A document that is similar to an earlier one."""

    index: int
    """index in the call"""
    earlier_input: int
    """number of the earlier document's input, and line in it"""
    earlier_line: int
    similarity: float
    """estimated Jaccard similarity"""


def make_records(origins: Origins, signatures: npt.NDArray[Any]) -> Records:
    """Return the records of documents."""
    records = np.zeros(len(signatures), RECORD)
    records["origins"], records["signatures"] = origins, signatures.astype(np.uint16)
    return records


def band_size(threshold: float) -> int:
    """Return the largest number of values per band with which similar documents are compared often enough.

    Two documents whose similarity is the threshold share a band with a probability of at least 95%.
    """
    return max(size for size in range(1, NUM_VALUES + 1)
               if 1 - (1 - threshold**size) ** (NUM_VALUES // size) >= _LEAST_RECALL)


def _place(record: np.void) -> tuple[int, int]:
    return int(record["origins"]["input"]), int(record["origins"]["line"])


class NearDuplicates:
    """The documents so far that are no near-duplicates. `path`: file of the table; `file` has the records so far."""

    def __init__(self, path: Path, file: AppendFile, threshold: float, *, first_slots: int = _FIRST_SLOTS) -> None:
        self._file, self._threshold = file, threshold
        self._band_size = band_size(threshold)
        self._num_bands = NUM_VALUES // self._band_size
        self._num_entries = 0
        num_records = file.size // RECORD.itemsize
        self._table = SlotTable(path, 1, slots_for(num_records * self._num_bands, first_slots))
        self._read_file(num_records)

    def add(self, records: Records) -> list[NearDuplicate]:
        """Return which documents are near-duplicates, in order. The others are appended to the file.

        Raises OSError if the disk is full.
        """
        return [replace(near, index=start + near.index) for start in range(0, len(records), _BATCH)
                for near in self._add(records[start : start + _BATCH])]

    def close(self) -> None:
        """Delete the table."""
        self._table.close()

    def _add(self, records: Records) -> list[NearDuplicate]:
        values = records["signatures"]
        documents = np.flatnonzero((values != 0xFFFF).any(axis=1))  # those with words
        records, values = records[documents], values[documents]
        bands = self._band_hashes(values)
        owners = self._find(bands, values)
        near = self._compare(records, bands, owners)
        is_kept = np.ones(len(records), np.bool_)
        is_kept[list(near)] = False
        first_row = self._file.size // RECORD.itemsize
        self._file.append(records[is_kept].tobytes())
        self._insert(bands[is_kept], owners[is_kept], first_row)
        return [NearDuplicate(int(documents[index]), *match) for index, match in sorted(near.items())]

    def _compare(self, records: Records, bands: _Hashes, owners: _Rows) -> dict[int, tuple[int, int, float]]:
        """Return (input, line, similarity) of the first similar document, for each near-duplicate."""
        matches = self._compare_with_file(records, owners)
        # Equal bands within this call: a document is compared with the first one that is kept.
        _, group, count = np.unique(bands, return_inverse=True, return_counts=True)
        group = group.reshape(bands.shape)
        is_shared = (count[group] > 1) & (owners < 0)
        first: dict[int, int] = {}
        for index in np.flatnonzero(is_shared.any(axis=1)).tolist():
            groups = group[index, is_shared[index]].tolist()
            for other in sorted({first[key] for key in groups if key in first} if index not in matches else ()):
                similarity = float((records["signatures"][index] == records["signatures"][other]).mean())
                if similarity >= self._threshold:
                    matches[index] = (*_place(records[other]), similarity)
                    break
            if index not in matches:
                for key in groups:
                    first.setdefault(key, index)
        return matches

    def _compare_with_file(self, records: Records, owners: _Rows) -> dict[int, tuple[int, int, float]]:
        """Compare each document with those in the file that share a band, in their order."""
        pairs = np.unique(np.stack([np.nonzero(owners >= 0)[0], owners[owners >= 0]], axis=1), axis=0)
        earlier = self._read_rows(pairs[:, 1])
        similarities = (records["signatures"][pairs[:, 0]] == earlier["signatures"]).mean(axis=1)
        matches: dict[int, tuple[int, int, float]] = {}
        for number in np.flatnonzero(similarities >= self._threshold).tolist():
            matches.setdefault(int(pairs[number, 0]), (*_place(earlier[number]), float(similarities[number])))
        return matches

    def _band_hashes(self, values: npt.NDArray[np.uint16]) -> _Hashes:
        """Return the hash of each band of each document [n, bands]."""
        used = values[:, : self._num_bands * self._band_size].astype(np.uint64)
        parts = used.reshape(len(values), self._num_bands, self._band_size)
        hashes = np.broadcast_to(np.arange(1, self._num_bands + 1, dtype=np.uint64), parts.shape[:2])
        for place in range(self._band_size):
            hashes = finalize(hashes * np.uint64(0x9E3779B97F4A7C15) + parts[:, :, place])
        return hashes

    def _find(self, bands: _Hashes, values: npt.NDArray[np.uint16]) -> _Rows:
        """Return the row in the file of the first document with each band [n, bands]; -1 if there is none."""
        tags, size = bands.ravel() & _TAG_BITS, self._band_size

        def is_same(entries: _Hashes, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
            result = entries[:, 0] & _TAG_BITS == tags[keys]
            likely = np.flatnonzero(result)  # the tag is half of a hash: compare the band itself, in the file
            document, band = np.divmod(keys[likely], self._num_bands)
            columns = band[:, None] * size + np.arange(size)
            earlier = self._read_rows((entries[likely, 0] & ~_TAG_BITS).astype(np.int64) - 1)["signatures"]
            same = np.take_along_axis(earlier, columns, axis=1) == values[document[:, None], columns]
            result[likely] = same.all(axis=1)
            return result

        entries = self._table.find(bands.ravel(), is_same)
        return (entries[:, 0] & ~_TAG_BITS).astype(np.int64).reshape(bands.shape) - 1

    def _insert(self, bands: _Hashes, owners: _Rows, first_row: int) -> None:
        """Enter the documents of consecutive rows as the first ones with the bands that have no owner."""
        if (slots := slots_for(self._num_entries + bands.size, self._table.slots)) > self._table.slots:
            self._num_entries = 0
            self._table.make(slots)
            self._read_file(first_row + len(bands))
            return
        rows = np.broadcast_to(first_row + np.arange(1, len(bands) + 1, dtype=np.uint64)[:, None], bands.shape)
        hashes, first = np.unique(bands[owners < 0], return_index=True)
        entries = (hashes & _TAG_BITS) | rows[owners < 0][first]
        self._table.insert(hashes, entries[:, None], lambda found, _: np.zeros(len(found), np.bool_))
        self._num_entries += len(hashes)

    def _read_file(self, count: int) -> None:
        """Enter the first documents of the file into the empty table."""
        for start in range(0, count, _BATCH):
            values = self._read(start, min(_BATCH, count - start))["signatures"]
            bands = self._band_hashes(values)
            self._insert(bands, self._find(bands, values), start)

    def _read_rows(self, rows: _Rows) -> Records:
        distinct, places = np.unique(rows, return_inverse=True)
        records = np.zeros(len(distinct), RECORD)
        for number, row in enumerate(distinct.tolist()):
            records[number] = self._read(row, 1)[0]
        return records[places]

    def _read(self, row: int, count: int) -> Records:
        content = os.pread(self._file.descriptor, count * RECORD.itemsize, row * RECORD.itemsize)
        return np.frombuffer(content, RECORD)
