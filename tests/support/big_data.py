"""A data set of several hash blocks: a sparse .bin, which is written and hashed in a moment."""

import os
from pathlib import Path

import numpy as np

from pretrain.data.indexed import IndexedWriter

NUM_BLOCKS = 7
NUM_TOKENS = (NUM_BLOCKS * 2**24 - 2**20) // 2  # uint16; the last block is shorter
BYTE = 5 * 2**24 + 12345  # of a token that is not one of the samples of the fingerprint


def write_big_data(prefix: Path, *, hashes: bool = False) -> Path:
    """Write 111 MiB of zeros as one document in two sequences, without or with PREFIX.sha256.json."""
    with IndexedWriter(prefix, np.uint16) as writer:
        zeros = np.zeros(2**20, np.uint16)
        for start in range(0, NUM_TOKENS, 2**20):
            writer.add_documents(zeros[:NUM_TOKENS - start], [min(2**20, NUM_TOKENS - start)])
        writer.finalize({"vocab_size": 256, "eod_token": 0, "max_token": 249})
    if not hashes:
        Path(f"{prefix}.sha256.json").unlink()
    return prefix


def change_token(prefix: Path, *, keep_mtime: bool) -> None:
    """Change one byte in the middle of the .bin."""
    path = Path(f"{prefix}.bin")
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(BYTE)
        old = file.read(1)
        file.seek(BYTE)
        file.write(bytes([old[0] ^ 1]))
    later = 0 if keep_mtime else 1_000_000_000  # a clock with coarse ticks may give the same time again
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))
