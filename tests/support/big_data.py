"""A data set of several hash blocks: a sparse .bin, which is written and hashed in a moment."""

import os
from pathlib import Path

import numpy as np

from pretrain.data.token_files.writer import IndexedWriter

NUM_BLOCKS = 7
BYTE = 5 * 2**24 + 12345  # of a token that is not one of the samples of the fingerprint


def write_big_data(prefix: Path, *, num_blocks: int = NUM_BLOCKS, hashes: bool = False) -> Path:
    """Write zeros in documents of 2 MiB, without or with PREFIX.sha256.json. The last block is 1 MiB shorter."""
    num_tokens = (num_blocks * 2**24 - 2**20) // 2
    with IndexedWriter(prefix, np.uint16) as writer:
        zeros = np.zeros(2**20, np.uint16)
        for start in range(0, num_tokens, 2**20):
            writer.add_documents(zeros[:num_tokens - start], [min(2**20, num_tokens - start)])
        writer.finalize({"vocab_size": 256, "eod_token": 0, "max_token": 249})
    if not hashes:
        Path(f"{prefix}.sha256.json").unlink()
    return prefix


def change_token(prefix: Path, *, keep_mtime: bool, byte: int = BYTE) -> None:
    """Change one byte of the .bin."""
    path = Path(f"{prefix}.bin")
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ 1]))
    later = 0 if keep_mtime else 1_000_000_000  # a clock with coarse ticks may give the same time again
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + later))
