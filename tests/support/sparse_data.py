"""Data sets of very many documents in sparse files, which are written in a moment and need little space."""

import os
from pathlib import Path

import numpy as np

from pretrain.data.token_files.index_file import HEADER, MAGIC


def write_sparse_data(prefix: Path, *, num_documents: int, full_documents: int, length: int) -> Path:
    """Write a valid uint16 pair: empty documents, and at the end `full_documents` documents of `length` tokens.

    An empty document has no sequence at its end: the document index repeats 0, and the last entries count the
    sequences. The tokens are zeros.
    """
    sequences = num_documents - full_documents + np.arange(full_documents, dtype=np.int64)
    arrays = ((4, np.full(full_documents, length, "<i4")),
              (8, np.arange(full_documents, dtype="<i8") * length * 2),
              (8, (sequences + 1).astype("<i8")))
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1))
        end = HEADER.size
        for number, (width, values) in enumerate(arrays):
            end += width * (num_documents + (number == 2))
            file.seek(end - values.nbytes)
            file.write(values.tobytes())
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", full_documents * length * 2)
    return prefix
