"""`ds-pretrain data overlap`: compare training data with evaluation sets, report and remove what they share."""

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.cli import path, path_text, prefix, stop_on_signals, text, whole_number
from pretrain.commands.data import add_overwrite, bin_bytes, print_written
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
from pretrain.data.text_inputs.chunk import FORMATS, ReadSettings, parse_separator
from pretrain.data.token_files.hashes import hashes_path, read_hashes
from pretrain.data.token_files.index_file import ranges
from pretrain.data.token_files.indexed_dataset import IndexedDataset, open_checked
from pretrain.data.token_files.inspect_files import Advance
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.overlap.evaluation_sets import EvaluationSet, find_tokenizer, read_set
from pretrain.extensions.overlap.ngrams import Numbers, Overlap, index_ngrams, search
from pretrain.paths import check_file, writing
from pretrain.progress import ProgressBar

_WORST = 20  # documents of each set in the JSON
_SHOWN = 3  # rows on the terminal
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


def add_overlap(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to those of `ds-pretrain data`."""
    command = commands.add_parser(
        "overlap", help="find the documents that contain text of evaluation sets",
        description="Find the documents of training data that contain text of evaluation sets (contamination): runs of "
                    "N tokens that both have.")
    add = command.add_argument
    command.set_defaults(function=_overlap)
    add("prefix", metavar="PREFIX", type=prefix, help="path of the training data, without .bin")
    add("--against", required=True, metavar="EVAL", nargs="+", type=path_text,
        help="evaluation sets: token files (the path without .bin), or text, JSON lines or Parquet as ds-pretrain "
             "prepare reads it: a file, a folder, a glob in quotes")
    add("--ngram", type=whole_number(2, 1000), default=13, metavar="N",
        help="tokens of a match (default: %(default)s)")
    add("--max_documents", type=whole_number(1, 10**9), default=10, metavar="N",
        help="a run of tokens in more training documents is no match, but something like a license or a menu "
             "(default: %(default)s)")
    add("--remove", action="store_true", help="write the training documents without a match to --out")
    add("--out", type=prefix, metavar="PREFIX", help="path of the data set that --remove writes, without .bin")
    add_overwrite(command)
    add("--json", type=path, metavar="FILE", help="also write the report to this file")
    add("--tokenizer", type=path_text, metavar="PATH",
        help="tokenizer of the training data, for text (default: the one that PREFIX.meta.json names)")
    add("--format", choices=FORMATS, default="auto", help="format of text (default: %(default)s, by its content)")
    add("--jsonl_key", type=text, default="text",
        help="key of the text in a JSON line, column in a Parquet file (default: %(default)s)")
    add("--document_separator", type=text,
        help=r"text between two documents of a text file, such as '\n\n' (default: a file is one document)")
    add("--workers", type=whole_number(1, 1024), help="worker processes (default: one per CPU core)")


def _overlap(flags: argparse.Namespace) -> int:
    if flags.remove != (flags.out is not None):
        raise ConfigError("--remove" if flags.remove else "--out", problem="--remove writes the documents without a "
                          "match to a new data set, --out", remedy="give both flags or none")
    if flags.json is not None:
        check_file(flags.json, "--json")
    separator = parse_separator(flags.document_separator) if flags.document_separator else ""
    train = open_train(flags.prefix, flags.out, overwrite=flags.overwrite)
    with stop_on_signals():
        with ProgressBar(f"searching {flags.prefix}", bin_bytes([flags.prefix])) as progress:
            result = find_overlap(train, flags.against, n=flags.ngram, most_documents=flags.max_documents,
                                  tokenizer=flags.tokenizer, workers=flags.workers or len(os.sched_getaffinity(0)),
                                  read=ReadSettings(flags.format, flags.jsonl_key, separator),
                                  advance=progress.advance)
        print("\n".join([*result.lines(), *(f"note: {note}" for note in result.notes)]))
        if flags.json is not None:
            flags.json.write_text(json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8",
                                  errors="backslashreplace")
        if flags.remove:
            with ProgressBar(f"writing {flags.out}", bin_bytes([flags.prefix])) as progress:
                print_written([remove_overlap(result, flags.out, progress.advance)])
    return 0
