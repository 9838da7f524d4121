"""Data sets whose tokens are consecutive numbers, so that each token identifies its position."""

from pathlib import Path

import numpy as np

from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter


def write_counting(prefix: Path, lengths: list[int], *, first: int = 0) -> IndexedDataset:
    """Write documents of these lengths, whose tokens count up from `first` over all documents, and open them."""
    with IndexedWriter(prefix, "int32") as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
        writer.finalize()
    return IndexedDataset(prefix)
