"""Compare data sets with the hashes of all their bytes: blocks at the start of a run, all in `tools/data.py verify`."""

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.token_files.describe import Advance
from pretrain.data.token_files.hashes import BLOCK_BYTES, DataHashes, hash_block, hashes_path, read_hashes, write_hashes
from pretrain.data.token_files.indexed_dataset import IndexedDataset, open_checked
from pretrain.errors import ConfigError

CHECK_S = 0.2  # time in which a start checks blocks


@dataclass(frozen=True)
class FoundHashes:
    """Hashes that earlier programs have stored for a data set."""

    current: DataHashes | None  # of the files as they are: sizes, modification time of the .bin and .idx are the same
    earlier: DataHashes | None  # complete hashes of an earlier version of the files
    path: Path | None  # of `current`
    notes: tuple[str, ...]  # about files that cannot be used


def find_hashes(indexed: IndexedDataset, fallback: Path) -> FoundHashes:
    """Read PREFIX.sha256.json and `fallback`, which is used if the folder of the data is read-only."""
    notes: list[str] = []
    current: tuple[DataHashes, Path] | None = None
    earlier: DataHashes | None = None
    for path in (hashes_path(indexed.prefix), fallback):
        try:
            hashes = read_hashes(path)
        except ValueError as error:
            notes.append(f"{path} is ignored and will be written again: {error}")
            continue
        if hashes is None:
            continue
        if hashes.idx_mtime_ns is None and not indexed.index.is_small:
            notes.append(f"{path} was written by an earlier version: each start reads the whole .idx to compare it; "
                         f"python tools/data.py hash {indexed.prefix} writes it again")
        if indexed.is_described_by(hashes):
            if current is None or len(hashes.blocks) > len(current[0].blocks):
                current = hashes, path
        elif hashes.is_complete:
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
    for number in random.SystemRandom().sample(range(len(blocks)), len(blocks)):
        if hash_block(indexed.file.descriptor, number) != blocks[number]:
            raise damaged_block(indexed, number, found.path)
        if time.monotonic() >= end:
            return


def damaged_block(indexed: IndexedDataset, number: int, path: Path | None) -> ConfigError:
    """Return the error for a block of the .bin whose bytes have changed."""
    start = number * BLOCK_BYTES
    end = min(start + BLOCK_BYTES, indexed.file.status().st_size)
    recorded = f"the SHA-256 that {path.name} records" if path else "the SHA-256 that it had"
    return ConfigError(str(indexed.bin_path), problem=f"bytes {start} to {end} do not have {recorded}: the file is "
                       "damaged, or was changed without a new modification time",
                       remedy="restore the file; or, if you changed it, hash it again: python tools/data.py hash "
                              f"{indexed.prefix}")


def hash_if_fast(indexed: IndexedDataset, seconds: float) -> None:
    """Hash the .bin if this takes less than `seconds` at the speed of the first blocks; set `indexed.hashes`.

    Data with a large .idx that has no hash yet is left to the background.
    """
    if not indexed.idx_sha256:
        return
    status = indexed.file.status()
    blocks: list[str] = []
    start = time.monotonic()
    hashes = indexed.new_hashes(status, ())
    for number in range(hashes.num_blocks):
        blocks.append(hash_block(indexed.file.descriptor, number))
        if (time.monotonic() - start) / len(blocks) * hashes.num_blocks > seconds and len(blocks) < hashes.num_blocks:
            return
    after = indexed.file.status()
    if (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
        indexed.hashes = indexed.new_hashes(status, tuple(blocks))


def store_hashes(prefix: str, advance: Advance) -> DataHashes:
    """Hash every byte of a data set, and write PREFIX.sha256.json. Raises ConfigError."""
    data, path = IndexedDataset(prefix), hashes_path(prefix)
    hashes = _hash(data, advance)
    try:
        write_hashes(path, hashes)
    except OSError as error:
        raise ConfigError(str(path), problem=f"it cannot be written: {error.strerror}",
                          remedy="hash the data as a user who may write there") from None
    return hashes


def verify_data(prefix: str, advance: Advance) -> tuple[list[str], str]:
    """Check every entry of the .idx, and compare every byte with PREFIX.sha256.json.

    Return a line for each difference, and what was compared. Raises ConfigError for a damaged pair, and for hashes that
    cannot be used.
    """
    data, path = open_checked(prefix), hashes_path(prefix)
    remedy = f"python tools/data.py hash {prefix} writes "
    try:
        stored = read_hashes(path)
    except ValueError as error:
        raise ConfigError(str(path), problem=f"it is damaged: {error}", remedy=f"{remedy}it") from None
    if stored is None:
        return [], f"every entry of the .idx is right; the bytes cannot be compared: there are no hashes. {remedy}them"
    if not stored.is_complete:
        raise ConfigError(str(path), problem="it has the hashes of a part of the .bin only", remedy=f"{remedy}it")
    return _differences(data, stored, path, advance), "every byte has its hash"


def _differences(data: IndexedDataset, stored: DataHashes, path: Path, advance: Advance) -> list[str]:
    lines = []
    if data.index.sha256 != stored.idx_sha256:
        lines.append(f"{data.idx_path}: it does not have the SHA-256 of {path}")
    found_bytes = data.file.status().st_size
    if found_bytes != stored.bin_bytes:
        return [*lines, f"{data.bin_path}: {found_bytes} bytes, and {stored.bin_bytes} in {path}"]
    found = _hash(data, advance)
    for number, (expected, digest) in enumerate(zip(stored.blocks, found.blocks, strict=True)):
        if digest != expected:
            start = number * BLOCK_BYTES
            lines.append(f"{data.bin_path}: bytes {start} to {min(start + BLOCK_BYTES, found_bytes)} do not have the "
                         f"SHA-256 of {path}")
    return lines


def _hash(data: IndexedDataset, advance: Advance) -> DataHashes:
    """Hash a data set. Raises ConfigError if it is changed at the same time."""
    status = data.file.status()
    try:
        data.idx_sha256 = data.index.sha256
        hashes = data.new_hashes(status, ())
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            blocks = tuple(_with_progress(pool.map(lambda number: hash_block(data.file.descriptor, number),
                                                   range(hashes.num_blocks)), advance))
    except OSError as error:
        raise ConfigError(str(data.bin_path), problem=f"it cannot be read: {error.strerror}") from None
    after = data.file.status()
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise ConfigError(str(data.bin_path), problem="it was changed while it was read", remedy="try again")
    return data.new_hashes(status, blocks)


def _with_progress(digests: Iterator[str], advance: Advance) -> Iterator[str]:
    for digest in digests:
        advance(BLOCK_BYTES, "")
        yield digest
