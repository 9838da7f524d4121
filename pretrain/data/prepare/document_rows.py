"""Facts about each document besides its tokens; OUT.shard-I-of-N.documents: a row for each document of a shard.

A merge gives the tokens of the documents and these rows to `DocumentWriter.add`, as fields of a TokenizedBatch. A fact
that `add` needs for each document is added in three places: a column here, a field of DocumentFacts, and the
TokenizedBatch that `replay` in merge_shards.py makes. Files of other columns are then rejected by their size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.duplicates.seen_digests import DIGEST_BYTES, Digests
from pretrain.data.prepare.duplicates.signatures import NUM_VALUES

ORIGIN = np.dtype([("input", "<i4"), ("line", "<i8")])
"""number of a document's input, and its line or row in it"""
SIGNATURE = ("signatures", "<u2", (NUM_VALUES,))
"""low 16 bits of the values of a signature: the others make few equal ones different (2^-16)"""
_COLUMNS = [("text_bytes", "<i8"), ("digests", "<u8", (DIGEST_BYTES // 8,)), ("origins", ORIGIN)]
_ROW, _SIGNED_ROW = np.dtype(_COLUMNS), np.dtype([*_COLUMNS, SIGNATURE])

Origins = npt.NDArray[np.void]


def row_type(*, has_signatures: bool) -> "np.dtype[np.void]":
    """Return the type of the rows of a shard."""
    return _SIGNED_ROW if has_signatures else _ROW


@dataclass(frozen=True)
class DocumentFacts:
    """Facts about some documents, an entry for each."""

    text_bytes: npt.NDArray[np.int64]
    """bytes of the texts [n]"""
    digests: Digests
    """hashes of the tokens [n, 2]"""
    origins: Origins
    """[n]"""
    signatures: npt.NDArray[Any] | None
    """[n, NUM_VALUES] if near-duplicates are looked for"""

    def __getitem__(self, index: "slice | npt.NDArray[np.bool_]") -> "DocumentFacts":
        signatures = None if self.signatures is None else self.signatures[index]
        return DocumentFacts(self.text_bytes[index], self.digests[index], self.origins[index], signatures)

    def rows(self) -> npt.NDArray[np.void]:
        """Return the rows of a shard."""
        rows = np.zeros(len(self.text_bytes), row_type(has_signatures=self.signatures is not None))
        rows["text_bytes"], rows["digests"], rows["origins"] = self.text_bytes, self.digests, self.origins
        if self.signatures is not None:
            rows["signatures"] = self.signatures.astype(np.uint16)
        return rows
