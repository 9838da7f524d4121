"""Hash and verify whole data sets, on all CPU cores."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pretrain.data.commands.copy_documents import Advance, open_checked
from pretrain.data.files.hashes import BLOCK_BYTES, DataHashes, hash_block, hashes_path, read_hashes, write_hashes
from pretrain.data.files.indexed import IndexedDataset
from pretrain.errors import ConfigError


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
