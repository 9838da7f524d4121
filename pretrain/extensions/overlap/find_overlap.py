"""Compare training data with evaluation sets, report what they share, and write the data without it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.data.copy_documents import (
    CHUNK_DOCUMENTS,
    MERGED_FROM,
    CopyWriter,
    check_output,
    copy_chosen,
    meta_of,
    provenance,
)
from pretrain.data.data_spec import absolute_words
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.token_files.hashes import hashes_path, read_hashes
from pretrain.data.token_files.index_file import ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset, open_checked
from pretrain.data.token_files.inspect_files import Advance
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from pretrain.extensions.overlap.evaluation_sets import EvaluationSet, find_tokenizer, read_set
from pretrain.extensions.overlap.ngrams import index_ngrams
from pretrain.extensions.overlap.report import SetReport, report_json, report_lines, report_set
from pretrain.extensions.overlap.search import Overlap, search
from pretrain.paths import writing


@dataclass(frozen=True)
class OverlapResult:
    """N-grams that training data and evaluation sets share."""

    train: IndexedDataset
    n: int
    sets: tuple[EvaluationSet, ...]
    overlap: Overlap
    reports: list[SetReport]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        return report_lines(self.train, self.reports, self.overlap, self.n)

    def to_json(self) -> dict[str, Any]:
        return report_json(self.train, self.reports, self.overlap, self.n)


def open_train(prefix: str, output: str | None, *, overwrite: bool) -> IndexedDataset:
    """Open the training data. Raises ConfigError, also if the data set `output` cannot be written."""
    train = open_checked(prefix)
    if output is not None:
        check_output([output], [train], "--out", overwrite=overwrite,
                     num_bytes=train.num_tokens * train.dtype.itemsize)
    return train


def find_overlap(train: IndexedDataset, against: Sequence[str], *, n: int, most_documents: int, tokenizer: str | None,
                 read: ReadSettings, workers: int, advance: Advance) -> OverlapResult:
    """Compare the training data with all evaluation sets. Raises ConfigError.

    most_documents: n-grams in more training documents are no matches. advance: is called with the number of bytes of
    the training data that were searched, and "".
    """
    loaded = find_tokenizer(train, tokenizer)
    sets = tuple(read_set(word, train, loaded, read) for word in against)
    bounds = np.cumsum([0, *(len(found.tokens) for found in sets)]).tolist()
    tokens = np.concatenate([found.tokens for found in sets])
    ends = np.concatenate([found.ends + start for found, start in zip(sets, bounds, strict=False)])
    ngrams, ids = index_ngrams(tokens, ends, n)
    if ngrams.number == 0:
        raise ConfigError("--against", problem=f"no document has {n} tokens", remedy="give a smaller --ngram")
    overlap = search(train, ngrams, most_documents=most_documents, workers=workers, advance=advance)
    reports = [report_set(found, ids[start : start + len(found.tokens)], overlap, n=n, tokenizer=loaded)
               for found, start in zip(sets, bounds, strict=False)]
    return OverlapResult(train, n, sets, overlap, reports, _notes(train, sets))


def _notes(train: IndexedDataset, sets: Sequence[EvaluationSet]) -> tuple[str, ...]:
    notes = list(train.notes)
    token_files = [found.name for found in sets if found.places is None]
    unknown = [name for name in token_files if not _names_tokenizer(IndexedDataset(name))]
    if token_files and (unknown or not _names_tokenizer(train)):
        where = ([] if _names_tokenizer(train) else [str(train.prefix)]) + unknown
        notes.append(f"{', '.join(where)}: no .meta.json names the tokenizer; the comparison is right only if all data "
                     "has the same one")
    if is_rearranged(train.meta):
        notes.append(f"{train.prefix}: its documents were rearranged by --fim_rate: matches across their parts are not "
                     "found")
    return tuple(notes)


def _names_tokenizer(data: IndexedDataset) -> bool:
    return bool(data.meta.get("tokenizer_sha256"))


def is_rearranged(meta: Mapping[str, Any]) -> bool:
    """Return whether --fim_rate rearranged documents of a data set, or of one that was merged into it."""
    return bool(meta.get("fill_in_middle")) or any(map(is_rearranged, meta.get(MERGED_FROM) or []))


def remove_overlap(result: OverlapResult, output: str, advance: Advance) -> IndexedWriter:
    """Write the training documents without a match to a new data set. Raises ConfigError."""
    train, removed = result.train, result.overlap.contaminated_documents()
    if len(removed) == train.num_documents:
        raise ConfigError("--remove", problem="all training documents have a match, and none would remain",
                          remedy="give a larger --ngram or a smaller --max_documents")
    hashes = read_hashes(hashes_path(train.small_files))
    known = hashes.sha256 if hashes is not None and train.is_described_by(hashes) else None
    earlier = provenance(train)
    removals = [*earlier.get("without_overlap", []), {
        "source": absolute_words(str(train.prefix)), "source_sha256": known, "ngram": result.n,
        "max_documents": result.overlap.most_documents, "removed_documents": len(removed),
        "against": [{"name": found.name if not Path(found.name).exists() else str(Path(found.name).absolute()),
                     "documents": len(found.ends), "tokens_sha256": _sha256(found)} for found in result.sets]}]
    with writing("--out"), CopyWriter(output, train.dtype) as writer:
        for first, last in ranges(0, train.num_documents, CHUNK_DOCUMENTS):
            choice = np.zeros(last - first, np.int8)
            low, high = np.searchsorted(removed, [first, last]).tolist()
            choice[removed[low:high] - first] = -1
            copy_chosen(train, first, choice, [writer], advance)
        writer.finalize(meta_of(train) | earlier | {"without_overlap": removals})
    return writer


def _sha256(found: EvaluationSet) -> str:
    """Return a hash of the documents of an evaluation set."""
    digest = hashlib.sha256(found.tokens.astype("<i8").tobytes())
    digest.update(found.ends.astype("<i8").tobytes())
    return digest.hexdigest()
