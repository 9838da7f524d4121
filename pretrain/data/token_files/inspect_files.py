"""Describe a data set, hash every byte of it, and compare every byte with its hashes, for `ds-pretrain data`."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.token_files.check_hashes import block_sha256
from pretrain.data.token_files.hashes import BLOCK_BYTES, DataHashes, hashes_path, read_hashes, write_hashes
from pretrain.data.token_files.index_file import CHUNK_ENTRIES, check_entries, ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset, open_checked, read_meta
from pretrain.errors import ConfigError, file_errors
from pretrain.remote import is_url

Advance = Callable[[int, str], None]  # `ProgressBar.advance`: number of bytes, note


@dataclass(frozen=True)
class Lengths:
    """Tokens of the shortest and of the longest document, and the number of documents without tokens."""

    shortest: int
    longest: int
    longest_document: int
    empty: int


def measure_lengths(data: IndexedDataset, advance: Advance) -> Lengths | None:
    """Read the lengths of all documents; None if there is no document. Raises ConfigError for a damaged index."""
    shortest, longest, where, empty = 2**63, -1, 0, 0
    for first, last in ranges(0, data.num_documents, CHUNK_ENTRIES):
        bounds = data.document_offsets(first, last)
        lengths = bounds[1:] - bounds[:-1]
        if int(lengths.min()) < 0:  # damage between the entries that a start checks
            check_entries(data.index)
        shortest, empty = min(shortest, int(lengths.min())), empty + int((lengths == 0).sum())
        if int(lengths.max()) > longest:
            longest, where = int(lengths.max()), first + int(lengths.argmax())
        advance(16 * (last - first), "")
    return Lengths(shortest, longest, where, empty) if data.num_documents else None


def describe(data: IndexedDataset, advance: Advance) -> list[tuple[str, str]]:
    """Return rows of a name and a value. Raises ConfigError."""
    lengths, num_bytes = measure_lengths(data, advance), data.num_tokens * data.dtype.itemsize
    rows = [("documents", f"{data.num_documents:,}"), ("tokens", f"{data.num_tokens:,} of {data.dtype.name}"),
            ("size", f"{num_bytes:,} bytes of tokens, {data.index.num_bytes:,} of index")]
    if data.num_sequences != data.num_documents:
        rows.append(("sequences", f"{data.num_sequences:,}"))
    if lengths is not None:
        rows += [("longest document", f"{_tokens(lengths.longest)} (document {lengths.longest_document:,})"),
                 ("shortest document", _tokens(lengths.shortest)),
                 ("mean document", f"{data.num_tokens / data.num_documents:,.1f} tokens")]
        rows += [("empty documents", f"{lengths.empty:,}")] if lengths.empty else []
    rows += _meta_rows(data)
    rows.append(("hashes", _hashes(data)))
    return [*rows, *(("note", note) for note in data.notes)]


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _meta_rows(data: IndexedDataset) -> list[tuple[str, str]]:
    meta = read_meta(data.small_files)
    if meta is None:
        return [("tokenizer", f"not known: there is no {data.prefix.name}.meta.json")]
    if meta.get("num_tokens", data.num_tokens) != data.num_tokens:
        return [("tokenizer", f"not known: {data.prefix.name}.meta.json is of other data: its num_tokens is "
                              f"{meta['num_tokens']:,}")]
    sha256 = meta.get("tokenizer_sha256")
    named = {"tokenizer": meta.get("tokenizer"), "SHA-256 of it": sha256, "vocabulary": meta.get("vocab_size"),
             "largest token": meta.get("max_token"), "begin of document": meta.get("bos_token"),
             "end of document": meta.get("eod_token"), "unigram entropy": meta.get("entropy_nats")}
    return [(name, f"{value:.4f} nats per token" if isinstance(value, float) else
             f"{value:,}" if isinstance(value, int) else value) for name, value in named.items() if value is not None]


def _hashes(data: IndexedDataset) -> str:
    path = hashes_path(data.small_files)
    remedy = f"`ds-pretrain data hash {data.prefix}` writes them"
    if data.is_remote:
        remedy = "`ds-pretrain data hash` writes them before the data is uploaded"
    try:
        hashes: DataHashes | None = read_hashes(path)
    except ValueError as error:
        return f"{path.name} cannot be used: {error}; {remedy}"
    if hashes is None:
        return f"none; {remedy}"
    if not data.is_described_by(hashes):
        return f"of an earlier version of the files; {remedy}"
    if not hashes.is_complete:
        return f"of the first {len(hashes.blocks)} of {hashes.num_blocks} blocks; {remedy}"
    return f"SHA-256 {hashes.sha256}"


def store_hashes(prefix: str, advance: Advance) -> DataHashes:
    """Hash every byte of a data set, and write PREFIX.sha256.json. Raises ConfigError."""
    if is_url(prefix):
        raise ConfigError(prefix, problem="hashes are not written to an object store",
                          remedy="hash the data where it was prepared, and upload PREFIX.sha256.json with it")
    data, path = IndexedDataset(prefix), hashes_path(prefix)
    hashes = _hash(data, advance)
    with file_errors(path, "it cannot be written: {}", "hash the data as a user who may write there"):
        write_hashes(path, hashes)
    return hashes


def verify_data(prefix: str, advance: Advance) -> tuple[list[str], str]:
    """Check every entry of the .idx, and compare every byte with PREFIX.sha256.json.

    Return a line for each difference, and what was compared. Raises ConfigError for a damaged pair, and for hashes that
    cannot be used.
    """
    data = open_checked(prefix)
    path = hashes_path(data.small_files)
    remedy = f"`ds-pretrain data hash {prefix}` writes "
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
    with file_errors(data.bin_path):
        data.idx_sha256 = data.index.sha256
        hashes = data.new_hashes(status, ())
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            blocks = tuple(_with_progress(pool.map(lambda number: block_sha256(data, number),
                                                   range(hashes.num_blocks)), advance))
    after = data.file.status()
    if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        raise ConfigError(str(data.bin_path), problem="it was changed while it was read", remedy="try again")
    return data.new_hashes(status, blocks)


def _with_progress(digests: Iterator[str], advance: Advance) -> Iterator[str]:
    for digest in digests:
        advance(BLOCK_BYTES, "")
        yield digest
