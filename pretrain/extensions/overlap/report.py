"""The report of an overlap: for each evaluation set, the documents with matches and the worst of them."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.token_files.index_file import ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import shorten
from pretrain.extensions.overlap.evaluation_sets import EvaluationSet
from pretrain.extensions.overlap.ngrams import Numbers, Overlap

_WORST = 20  # documents of each set in the JSON
_SHOWN = 3  # of these, on the terminal
_EXCERPT_TOKENS = 64
_EXCERPT_CHARACTERS = 70
_READ_DOCUMENTS = 1 << 16  # whose bounds are read at once


@dataclass(frozen=True)
class MatchedDocument:
    """A document of an evaluation set with at least one match."""

    place: str
    ngrams: int
    matched_ngrams: int
    train_document: int
    """training document with most of the matches; the first one of several"""
    longest_match_tokens: int
    text: str
    """the beginning of the longest match; numbers of tokens if the tokenizer is not known"""


@dataclass(frozen=True)
class SetReport:
    """Counts of an evaluation set."""

    name: str
    documents: int
    short_documents: int
    """with fewer than n tokens, which cannot match"""
    matched_documents: int
    ngrams: int
    """also equal ones"""
    matched_ngrams: int
    frequent_ngrams: int
    """in more training documents than count as a match"""
    worst: tuple[MatchedDocument, ...]
    """those with the largest fraction of matched n-grams first"""


def report_set(found: EvaluationSet, ids: Numbers, overlap: Overlap, *, n: int,
               tokenizer: Tokenizer | None) -> SetReport:
    """Return the report of a set. ids: the n-gram that begins at each of its tokens; -1: none."""
    starts = np.concatenate([np.zeros(1, np.int64), found.ends[:-1]]) if len(found.ends) else found.ends
    is_ngram = ids >= 0
    matched, frequent = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    matched[is_ngram] = overlap.matched[ids[is_ngram]]
    frequent[is_ngram] = overlap.documents_with[ids[is_ngram]] > overlap.most_documents
    ngrams, matches = (_sums(values, starts, found.ends) for values in (is_ngram, matched))
    fractions = matches / np.maximum(ngrams, 1)
    worst = np.lexsort((-matches, -fractions))[: min(_WORST, int((matches > 0).sum()))]
    documents = [_matched_document(found, int(number), int(starts[number]), int(found.ends[number]), ids, matched,
                                   overlap, n, tokenizer) for number in worst]
    return SetReport(found.name, len(found.ends), int((ngrams == 0).sum()), int((matches > 0).sum()), int(ngrams.sum()),
                     int(matches.sum()), int(frequent.sum()), tuple(documents))


def _sums(values: npt.NDArray[np.bool_], starts: Numbers, ends: Numbers) -> Numbers:
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    return totals[ends] - totals[starts]


def _matched_document(found: EvaluationSet, number: int, start: int, stop: int, ids: Numbers,
                      matched: npt.NDArray[np.bool_], overlap: Overlap, n: int,
                      tokenizer: Tokenizer | None) -> MatchedDocument:
    inside = matched[start:stop]
    edges = np.flatnonzero(np.diff(inside, prepend=False, append=False)).reshape(-1, 2)
    runs = edges[:, 1] - edges[:, 0]
    longest = int(runs.argmax())
    first, length = start + int(edges[longest, 0]), int(runs[longest]) + n - 1
    tokens = found.tokens[first : first + min(length, _EXCERPT_TOKENS)].tolist()
    text = tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))
    sources, counts = np.unique(overlap.documents_of(np.unique(ids[start:stop][inside])), return_counts=True)
    return MatchedDocument(found.place(number), int((ids[start:stop] >= 0).sum()), int(inside.sum()),
                           int(sources[counts.argmax()]), length, text + " ..." * (length > _EXCERPT_TOKENS))


def report_json(train: IndexedDataset, reports: list[SetReport], overlap: Overlap, n: int) -> dict[str, Any]:
    """Return all of it as JSON values."""
    return {"train": str(train.prefix), "train_documents": train.num_documents, "train_tokens": train.num_tokens,
            "contaminated_train_documents": len(overlap.contaminated_documents()),
            "contaminated_train_tokens": _contaminated_tokens(train, overlap), "ngram": n,
            "max_documents": overlap.most_documents, "sets": [asdict(report) for report in reports]}


def report_lines(train: IndexedDataset, reports: list[SetReport], overlap: Overlap, n: int) -> list[str]:
    """Return the report for a terminal."""
    lines = list[str]()
    for report in reports:
        rows = {
            "documents": f"{report.documents:,}" + f", {report.short_documents:,} of them shorter than {n} tokens and "
                         "not compared" * bool(report.short_documents),
            "with a match": f"{report.matched_documents:,} ({_percent(report.matched_documents, report.documents)})",
            f"matched {n}-grams": f"{report.matched_ngrams:,} of {report.ngrams:,} "
                                  f"({_percent(report.matched_ngrams, report.ngrams)})",
            f"frequent {n}-grams": f"{report.frequent_ngrams:,} in more than {overlap.most_documents:,} training "
                                   "documents: not counted as matches"}
        lines += [report.name, *(f"  {name:<19}{value}" for name, value in rows.items())]
        for document in report.worst[:_SHOWN]:
            lines += [f"  {document.place}: {_percent(document.matched_ngrams, document.ngrams)} of its {n}-grams; "
                      f"training document {document.train_document:,}",
                      f"    {shorten(repr(document.text), _EXCERPT_CHARACTERS)}"]
        if report.matched_documents > _SHOWN:
            lines.append(f"  ... --json FILE writes the worst {len(report.worst)}")
    count, tokens = len(overlap.contaminated_documents()), _contaminated_tokens(train, overlap)
    return [*lines, f"{train.prefix}: {count:,} of {train.num_documents:,} documents "
                    f"({_percent(count, train.num_documents)}), with {_percent(tokens, train.num_tokens)} of the "
                    "tokens, have a match"]


def _contaminated_tokens(train: IndexedDataset, overlap: Overlap) -> int:
    """Return the number of tokens of the training documents with a match."""
    documents, total = overlap.contaminated_documents(), 0
    for first, last in ranges(0, train.num_documents, _READ_DOCUMENTS):
        low, high = np.searchsorted(documents, [first, last]).tolist()
        if low < high:
            total += int(np.diff(train.document_offsets(first, last))[documents[low:high] - first].sum())
    return total


def _percent(part: int, total: int) -> str:
    return f"{part / max(total, 1):.2%}"
