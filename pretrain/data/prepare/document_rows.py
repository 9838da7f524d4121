"""OUT.shard-I-of-N.documents: a row for each document of a shard, in order.

A merge gives the tokens of the documents and these rows to `DocumentWriter.add`, as the fields of the same names of a
TokenizedBatch. A field that `add` needs for each document, such as a signature, is added in three places: a column of
ROW, a parameter of `document_rows`, and the TokenizedBatch that `replay` in merge_shards.py makes. Files of other
columns are then rejected by their size.
"""

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.seen_digests import DIGEST_BYTES, Digests

ROW = np.dtype([("text_bytes", "<i8"), ("digests", "<u8", (DIGEST_BYTES // 8,))])


def document_rows(text_bytes: npt.NDArray[np.int64], digests: Digests) -> npt.NDArray[np.void]:
    """Return the rows of documents: bytes of their texts [n], hashes of their tokens [n, 2]."""
    rows = np.zeros(len(text_bytes), ROW)
    rows["text_bytes"], rows["digests"] = text_bytes, digests
    return rows
