"""Describe a data set: its counts, its shortest and longest document, its tokenizer and its hashes."""

from collections.abc import Callable
from dataclasses import dataclass

from pretrain.data.token_files.hashes import DataHashes, hashes_path, read_hashes
from pretrain.data.token_files.index_file import CHUNK_ENTRIES, check_entries, ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset, meta_path, read_meta

Advance = Callable[[int, str], None]  # of a ProgressBar: number of bytes, note


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
    meta = read_meta(data.prefix)
    if meta is None:
        return [("tokenizer", f"not known: there is no {meta_path(data.prefix).name}")]
    if meta.get("num_tokens", data.num_tokens) != data.num_tokens:
        return [("tokenizer", f"not known: {meta_path(data.prefix).name} is of other data: its num_tokens is "
                              f"{meta['num_tokens']:,}")]
    sha256 = meta.get("tokenizer_sha256")
    named = {"tokenizer": meta.get("tokenizer"), "SHA-256 of it": sha256, "vocabulary": meta.get("vocab_size"),
             "largest token": meta.get("max_token"), "begin of document": meta.get("bos_token"),
             "end of document": meta.get("eod_token"), "unigram entropy": meta.get("entropy_nats")}
    return [(name, f"{value:.4f} nats per token" if isinstance(value, float) else
             f"{value:,}" if isinstance(value, int) else value) for name, value in named.items() if value is not None]


def _hashes(data: IndexedDataset) -> str:
    path = hashes_path(data.prefix)
    remedy = f"python tools/data.py hash {data.prefix} writes them"
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
