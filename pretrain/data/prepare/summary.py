"""Counts of a prepared data set, and their summary: PREFIX.summary.json, and the same as text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_step import DocumentStep
from pretrain.data.prepare.text_quality import FIELDS, quality_summary
from pretrain.stored_json import read_object

_LARGEST_SAMPLE = 20  # documents that were skipped, of which place and reason are kept
_LENGTH_CLASSES = 32  # class k has the documents of 2^(k-1) to 2^k - 1 tokens


@dataclass
class SourceCounts:
    """Counts of a source. Documents are those that were written; the quality is of the documents that were read."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    duplicates: int = 0
    quality: list[int] = field(default_factory=lambda: [0] * len(FIELDS))

    def add_quality(self, counts: Sequence[int]) -> None:
        self.quality = [before + new for before, new in zip(self.quality, counts, strict=True)]


@dataclass
class Statistics:
    """Counts of the documents that were written, and of those that were left out."""

    token_counts: npt.NDArray[np.int64]
    """[vocab_size]"""
    text_bytes: int = 0
    """bytes of the text of the documents that were written, as UTF-8"""
    documents: int = 0
    empty: int = 0
    """documents without text, or whose text has no tokens"""
    skipped: int = 0
    skipped_samples: list[tuple[str, str]] = field(default_factory=list)
    """(place, reason) of the first ones"""
    divided: int = 0
    """documents that were read in parts because they are long, also those that were left out"""
    duplicates: int = 0
    """documents with the tokens of an earlier one"""
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    longest_tokens: int = 0
    longest_place: str = ""
    lengths: list[int] = field(default_factory=lambda: [0] * _LENGTH_CLASSES)
    """number of documents of each class"""

    @property
    def tokens(self) -> int:
        return int(self.token_counts.sum())

    def add_documents(self, lengths: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Add complete documents: the number of tokens of each, and the bytes of their text."""
        self.documents += len(lengths)
        self.text_bytes += text_bytes
        classes = np.frexp(lengths.astype(np.float64))[1]  # exact: lengths are below 2^31
        for index, count in enumerate(np.bincount(classes, minlength=_LENGTH_CLASSES).tolist()):
            self.lengths[index] += count

    def add_tokens(self, tokens: npt.NDArray[Any]) -> None:
        self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))

    def add_longest(self, num_tokens: int, place: str) -> None:
        """Compare a document with the longest one. Of several, the first one is kept."""
        if num_tokens > self.longest_tokens:
            self.longest_tokens, self.longest_place = num_tokens, place

    def add_to_sources(self, documents: Mapping[str, int], tokens: Mapping[str, int],
                       text_bytes: Mapping[str, int]) -> None:
        """Add the counts of complete documents by source."""
        for name, count in documents.items():
            counts = self.sources[name]
            counts.documents += count
            counts.tokens += tokens.get(name, 0)
            counts.text_bytes += text_bytes.get(name, 0)

    def add_duplicates(self, documents: Mapping[str, int]) -> None:
        """Add the numbers of exact duplicates by source."""
        for name, count in documents.items():
            self.duplicates += count
            self.sources[name].duplicates += count

    def skip(self, place: str, reason: str) -> None:
        """Count a document that is left out because it cannot be read."""
        self.skipped += 1
        if len(self.skipped_samples) < _LARGEST_SAMPLE:
            self.skipped_samples.append((place, reason))

    def length_histogram(self) -> dict[str, int]:
        """Return the number of documents by length: {"1": ..., "2-3": ..., "4-7": ...}."""
        last = max((index for index, count in enumerate(self.lengths) if count), default=0)
        return {_class_name(index): count for index, count in enumerate(self.lengths[: last + 1]) if index or count}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "token_counts": self.token_counts.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Statistics":
        """Raises TypeError, KeyError or ValueError for values that `to_json` did not make."""
        samples = [(str(place), str(reason)) for place, reason in values["skipped_samples"]]
        return cls(**{**values, "token_counts": np.array(values["token_counts"], np.int64),
                      "skipped_samples": samples,
                      "sources": {name: SourceCounts(**counts) for name, counts in values["sources"].items()}})


def _class_name(index: int) -> str:
    if index < 2:
        return str(index)
    return f"{2 ** (index - 1)}-{2 ** index - 1}"


def entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy in nats of the frequencies `counts` [n]."""
    frequencies = counts[counts > 0] / max(counts.sum(), 1)
    return max(0.0, -math.fsum((frequencies * np.log(frequencies)).tolist()))  # not -0.0


_BAR = 40  # characters
_SHOWN = 5  # places, and sources
_NAME_WIDTH = 26
_COLUMNS = {"documents": 11, "tokens": 15, "B/token": 8, "letters": 8, "repeated": 9}


def make_summary(statistics: Statistics, *, unknown_token: int | None, duplicates_counted: bool, deduplicated: bool,
                 entropy_nats: float, inputs: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of PREFIX.summary.json. It has no times: the same inputs give the same file."""
    tokens = statistics.tokens
    unknown = 0 if unknown_token is None else int(statistics.token_counts[unknown_token])
    return {
        "inputs": inputs,
        "documents": statistics.documents,
        "tokens": tokens,
        "text_bytes": statistics.text_bytes,
        "bytes_per_token": round(statistics.text_bytes / max(tokens, 1), 4),
        "entropy_nats": entropy_nats,
        "longest_document": {"tokens": statistics.longest_tokens, "place": statistics.longest_place},
        "empty_documents": statistics.empty,
        "skipped_documents": statistics.skipped,
        "skipped_samples": [{"place": place, "reason": reason} for place, reason in statistics.skipped_samples],
        "duplicate_documents": statistics.duplicates if duplicates_counted else None,
        "duplicates_removed": deduplicated,
        "unknown_tokens": unknown,
        "unknown_fraction": unknown / max(tokens, 1),
        "document_lengths": statistics.length_histogram(),
        "sources": _source_rows(statistics.sources, duplicates_counted=duplicates_counted),
        "settings": dict(settings),
    }


def _source_rows(sources: Mapping[str, SourceCounts], *, duplicates_counted: bool) -> list[dict[str, Any]]:
    """Return what the summary says about each source."""
    rows = []
    for name, counts in sources.items():
        values = {key: value for key, value in asdict(counts).items() if key != "quality"}
        rows.append({"source": name, **values, "duplicates": counts.duplicates if duplicates_counted else None,
                     "bytes_per_token": round(counts.text_bytes / max(counts.tokens, 1), 4),
                     "tokens_per_document": round(counts.tokens / max(counts.documents, 1), 1),
                     "quality": quality_summary(counts.quality)})
    return rows


def read_summary(prefix: str | Path) -> dict[str, Any]:
    """Read PREFIX.summary.json. Raises OSError and ValueError."""
    return read_object(Path(f"{prefix}.summary.json"))


def summary_row(name: str, value: str) -> str:
    """Return a line of the summary for people."""
    return f"  {name:<18} {value}"


def summary_text(prefix: str | Path, steps: Sequence[DocumentStep] = ()) -> str:
    """Return PREFIX.summary.json as text, with the lines of steps of extensions."""
    summary = read_summary(prefix)
    longest, duplicates = summary["longest_document"], summary["duplicate_documents"]
    removed = "removed" if summary["duplicates_removed"] else "kept"
    rows = {
        "documents": f"{summary['documents']:,}",
        "tokens": f"{summary['tokens']:,}",
        "text": f"{summary['text_bytes'] / 1e6:,.1f} MB, {summary['bytes_per_token']:.2f} bytes per token",
        "unigram entropy": f"{summary['entropy_nats']:.4f} nats per token",
        "longest document": f"{longest['tokens']:,} tokens, {longest['place']}",
        "empty documents": f"{summary['empty_documents']:,} (left out)",
        "skipped documents": f"{summary['skipped_documents']:,}",
        "exact duplicates": "not counted (too many documents; --deduplicate counts them)" if duplicates is None
                            else f"{duplicates:,}" + f" ({removed})" * bool(duplicates),
        "unknown tokens": f"{summary['unknown_tokens']:,} ({summary['unknown_fraction']:.3%})",
    }
    lines = [str(prefix), f"  {summary['inputs']}"]
    for name, value in rows.items():
        lines += [summary_row(name, value), *(_skipped(prefix, summary) if name == "skipped documents" else [])]
    for step in steps:
        lines += step.lines(summary, f"{prefix}.summary.json")
    return "\n".join([*lines, "  documents by number of tokens", *_histogram(summary["document_lengths"]),
                      *_source_lines(summary["sources"], f"{prefix}.summary.json")])


def _skipped(prefix: str | Path, summary: Mapping[str, Any]) -> list[str]:
    samples = summary["skipped_samples"]
    lines = [f"    {sample['place']}: {sample['reason']}" for sample in samples[:_SHOWN]]
    if summary["skipped_documents"] > len(lines):
        lines.append(f"    ... the first {len(samples)} are in {prefix}.summary.json")
    return lines


def _histogram(lengths: Mapping[str, int]) -> list[str]:
    most = max(lengths.values(), default=0)
    width = max(map(len, lengths), default=0)
    return [f"    {name:>{width}} {count:>12,} {'#' * -(-_BAR * count // most)}".rstrip()
            for name, count in lengths.items()]


def _source_lines(rows: Sequence[Mapping[str, Any]], rest: str) -> list[str]:
    """Return a table of the largest sources. rest: the file that has all of them."""
    lines = [f"  {'source':<{_NAME_WIDTH}}" + "".join(f"{name:>{width}}" for name, width in _COLUMNS.items())]
    for row in sorted(rows, key=lambda row: -int(row["tokens"]))[:_SHOWN]:
        name, quality = row["source"], row["quality"]
        name = name if len(name) <= _NAME_WIDTH else "..." + name[3 - _NAME_WIDTH:]
        letters, repeated = (_percent(quality[key]) for key in ("letters_per_character", "duplicate_lines"))
        values = f"{row['documents']:,}", f"{row['tokens']:,}", f"{row['bytes_per_token']:.2f}", letters, repeated
        lines.append(f"  {name:<{_NAME_WIDTH}}" + "".join(
            f"{value:>{width}}" for value, width in zip(values, _COLUMNS.values(), strict=True)))
    if len(rows) > _SHOWN:
        lines.append(f"    ... all {len(rows)} are in {rest}")
    return lines


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
