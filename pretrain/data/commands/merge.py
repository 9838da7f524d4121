"""Merge data sets into one: the documents of all, in the given order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pretrain.data.commands.copy_documents import Advance, TokenCounts, copy_range, open_checked
from pretrain.data.commands.output import check_output
from pretrain.data.files.index_format import CODES
from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.files.meta import current_meta
from pretrain.data.files.writer import IndexedWriter
from pretrain.errors import ConfigError

_OF_TOKENIZER = ("vocab_size", "tokenizer", "tokenizer_sha256", "bos_token", "eod_token")


def merge(output: str, prefixes: Sequence[str], *, overwrite: bool,
          advance: Advance) -> tuple[IndexedWriter, list[str]]:
    """Write the documents of all data sets to `output`. Return its writer, which has the counts, and notes.

    The dtype is the widest one. Raises ConfigError for damaged data, data of different tokenizers, and existing output.
    """
    sources = [open_checked(prefix) for prefix in prefixes]
    dtype = np.result_type(*(source.dtype for source in sources))
    assert dtype in CODES, f"{dtype} has no code in the .idx format"
    check_output([output], sources, output, overwrite=overwrite,
                 num_bytes=dtype.itemsize * sum(source.num_tokens for source in sources))
    meta, notes = merged_meta(sources)
    counts = TokenCounts()
    try:
        with IndexedWriter(output, dtype) as writer:
            for source in sources:
                copy_range(source, 0, source.num_documents, writer, counts, advance)
            writer.finalize(complete_meta(meta, writer, counts))
    except OSError as error:
        raise ConfigError(output, problem=f"the files cannot be written: {error}") from None
    return writer, [*(note for source in sources for note in source.notes), *notes]


def complete_meta(meta: dict[str, Any], writer: IndexedWriter, counts: TokenCounts) -> dict[str, Any]:
    """Add the counts of the written tokens to the facts about their tokenizer."""
    entropy = counts.entropy_nats()
    return {**meta, "num_tokens": writer.num_tokens, "num_documents": writer.num_documents,
            "max_token": counts.max_token, **({} if entropy is None else {"entropy_nats": entropy})}


def meta_of(data: IndexedDataset) -> dict[str, Any]:
    """Return the facts about the tokenizer in PREFIX.meta.json; {} if there is none, or if it is of other data."""
    meta = current_meta(data.prefix, num_tokens=data.num_tokens)
    return {key: meta[key] for key in _OF_TOKENIZER if key in meta}


def merged_meta(sources: Sequence[IndexedDataset]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts about the tokenizer that all sources share, and a note about those that they do not.

    Raises ConfigError if two sources were prepared with different tokenizers.
    """
    metas = [meta_of(source) for source in sources]
    known = [(source, meta) for source, meta in zip(sources, metas, strict=True) if meta.get("tokenizer_sha256")]
    for source, meta in known[1:]:
        if meta["tokenizer_sha256"] != known[0][1]["tokenizer_sha256"]:
            raise ConfigError(str(source.prefix), problem=f"it was prepared with another tokenizer ({_name(meta)}) "
                              f"than {known[0][0].prefix} ({_name(known[0][1])})",
                              remedy="prepare both with the same tokenizer")
    found = [key for key in _OF_TOKENIZER if any(key in meta for meta in metas)]
    shared = {key: metas[0].get(key) for key in found
              if all(meta and meta.get(key) == metas[0].get(key) for meta in metas)}
    if "tokenizer_sha256" in shared:
        shared = {**shared, "tokenizer": metas[0].get("tokenizer", "")}  # the same tokenizer may have several paths
    missing = [key for key in found if key not in shared]
    if not missing:
        return shared, []
    return shared, [f"{', '.join(missing)}: left out of the .meta.json: not the same for every input"]


def _name(meta: dict[str, Any]) -> str:
    return f"{meta.get('tokenizer', 'tokenizer')}, SHA-256 {meta['tokenizer_sha256'][:12]}"
