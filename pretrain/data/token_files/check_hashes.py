"""Hashes of a data set at the start of a run: find them, compare some blocks with them, or hash small data."""

import hashlib
import os
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.token_files.hashes import BLOCK_BYTES, DataHashes, hash_block, hashes_path, read_hashes
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.token_file import TokenFile
from pretrain.errors import ConfigError

CHECK_S = 0.2  # time in which a start checks blocks


@dataclass(frozen=True)
class FoundHashes:
    """Hashes that earlier programs have stored for a data set."""

    current: DataHashes | None  # sizes and modification time of the .bin, and the .idx, are the same now
    earlier: DataHashes | None  # complete hashes of an earlier version of the files
    path: Path | None  # file that has `current`
    notes: tuple[str, ...]  # about files that cannot be used


def find_hashes(indexed: IndexedDataset, fallback: Path) -> FoundHashes:
    """Read PREFIX.sha256.json and `fallback`, which is used if the folder of the data is read-only."""
    notes: list[str] = []
    current: tuple[DataHashes, Path] | None = None
    earlier: DataHashes | None = None
    for path in (hashes_path(indexed.small_files), fallback):
        try:
            hashes = read_hashes(path)
        except ValueError as error:
            notes.append(f"{path} is ignored and will be written again: {error}")
            continue
        if hashes is None:
            continue
        if indexed.is_described_by(hashes):
            if current is None or len(hashes.blocks) > len(current[0].blocks):
                current = hashes, path
        elif hashes.is_complete and not indexed.is_remote:
            earlier = earlier or hashes
    return FoundHashes(current[0] if current else None, earlier, current[1] if current else None, tuple(notes))


def check_blocks(indexed: IndexedDataset, found: FoundHashes, *, seconds: float) -> None:
    """Compare randomly chosen blocks of the .bin with their hashes: at least one, and more within the given time.

    Raises ConfigError that names the first block that differs.
    """
    if found.current is None:
        return
    end = time.monotonic() + seconds
    blocks = found.current.blocks
    # ranks of a host, which have the same parent process, download the same block of data at a URL, once
    choice = random.Random(f"{socket.gethostname()} {os.getppid()}") if indexed.is_remote else random.SystemRandom()
    for number in choice.sample(range(len(blocks)), len(blocks)):
        if block_sha256(indexed, number) != blocks[number]:
            raise damaged_block(indexed, number, found.path)
        if time.monotonic() >= end:
            return


def block_sha256(indexed: IndexedDataset, number: int) -> str:
    """Return the SHA-256 of a block of the .bin; of one at a URL, this downloads the block."""
    if isinstance(indexed.file, TokenFile):
        return hash_block(indexed.file.descriptor, number)
    start = number * BLOCK_BYTES
    num_bytes = min(BLOCK_BYTES, indexed.file.status().st_size - start)
    return hashlib.sha256(indexed.file.read(start, num_bytes)).hexdigest()


def damaged_block(indexed: IndexedDataset, number: int, path: Path | None) -> ConfigError:
    """Return the error for a block of the .bin whose bytes have changed."""
    start = number * BLOCK_BYTES
    end = min(start + BLOCK_BYTES, indexed.file.status().st_size)
    recorded = f"the SHA-256 that {path.name} records" if path else "the SHA-256 that it had"
    return ConfigError(str(indexed.bin_path), problem=f"bytes {start} to {end} do not have {recorded}: the file is "
                       "damaged, or was changed without a new modification time",
                       remedy="restore the file; or, if you changed it, hash it again: "
                              f"`ds-pretrain data hash {indexed.prefix}`")


def hash_if_fast(indexed: IndexedDataset, seconds: float) -> None:
    """Hash the .bin if this takes less than `seconds` at the speed of the first blocks; set `indexed.hashes`.

    Data with a large .idx that has no hash yet is left to the background. Data at a URL is hashed only if it is one
    block: it would be downloaded.
    """
    if indexed.is_remote and indexed.file.status().st_size > BLOCK_BYTES:
        return
    if not indexed.idx_sha256:
        return
    status = indexed.file.status()
    blocks: list[str] = []
    start = time.monotonic()
    hashes = indexed.new_hashes(status, ())
    for number in range(hashes.num_blocks):
        blocks.append(block_sha256(indexed, number))
        if (time.monotonic() - start) / len(blocks) * hashes.num_blocks > seconds and len(blocks) < hashes.num_blocks:
            return
    after = indexed.file.status()
    if (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
        indexed.hashes = indexed.new_hashes(status, tuple(blocks))
