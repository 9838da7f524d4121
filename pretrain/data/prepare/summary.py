"""Counts of a prepared data set, and their summary: PREFIX.summary.json, and the same as text."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.duplicates.near_duplicates import NearSettings
from pretrain.data.prepare.sources import SourceCounts, source_lines, source_rows
from pretrain.stored_json import read_object

LARGEST_SAMPLE = 20  # documents that were skipped, of which place and reason are kept
_LENGTH_CLASSES = 32  # class k has the documents of 2^(k-1) to 2^k - 1 tokens


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
    near_duplicates: int = 0
    """other documents that are similar to an earlier one"""
    near_duplicate_tokens: int = 0
    near_duplicate_samples: list[tuple[str, str, float]] = field(default_factory=list)
    """(place, place of the earlier document, similarity) of the first ones"""
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

    def add_near_duplicate(self, source: str, num_tokens: int, *, place: str, earlier: str, similarity: float) -> None:
        self.near_duplicates += 1
        self.near_duplicate_tokens += num_tokens
        self.sources[source].near_duplicates += 1
        if len(self.near_duplicate_samples) < LARGEST_SAMPLE:
            self.near_duplicate_samples.append((place, earlier, round(similarity, 4)))

    def skip(self, place: str, reason: str) -> None:
        """Count a document that is left out because it cannot be read."""
        self.skipped += 1
        if len(self.skipped_samples) < LARGEST_SAMPLE:
            self.skipped_samples.append((place, reason))

    def length_histogram(self) -> dict[str, int]:
        """Return the number of documents by length: {"1": ..., "2-3": ..., "4-7": ...}."""
        last = max((index for index, count in enumerate(self.lengths) if count), default=0)
        return {_class_name(index): count for index, count in enumerate(self.lengths[: last + 1]) if index or count}

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "token_counts": self.token_counts.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Statistics":
        """Raises TypeError, KeyError or ValueError for values that `to_json` did not make."""
        samples = [(str(place), str(reason)) for place, reason in values["skipped_samples"]]
        return cls(**{**values, "token_counts": np.array(values["token_counts"], np.int64),
                      "skipped_samples": samples,
                      "near_duplicate_samples": [(*map(str, places), float(value))
                                                 for *places, value in values["near_duplicate_samples"]],
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
_SHOWN_PLACES = 5


def make_summary(statistics: Statistics, *, unknown_token: int | None, duplicates_counted: bool, deduplicated: bool,
                 near: NearSettings | None, entropy_nats: float, inputs: str,
                 settings: Mapping[str, Any]) -> dict[str, Any]:
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
        "near_duplicates": None if near is None else {
            "documents": statistics.near_duplicates, "tokens": statistics.near_duplicate_tokens,
            "removed": near.removes, "threshold": near.threshold,
            "samples": [{"place": place, "earlier": earlier, "similarity": similarity}
                        for place, earlier, similarity in statistics.near_duplicate_samples]},
        "unknown_tokens": unknown,
        "unknown_fraction": unknown / max(tokens, 1),
        "document_lengths": statistics.length_histogram(),
        "sources": source_rows(statistics.sources, duplicates_counted=duplicates_counted),
        "settings": dict(settings),
    }


def read_summary(prefix: str | Path) -> dict[str, Any]:
    """Read PREFIX.summary.json. Raises OSError and ValueError."""
    return read_object(Path(f"{prefix}.summary.json"))


def summary_text(prefix: str | Path) -> str:
    """Return PREFIX.summary.json as text."""
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
        **({} if summary["near_duplicates"] is None else {"near-duplicates": _near(summary["near_duplicates"])}),
        "unknown tokens": f"{summary['unknown_tokens']:,} ({summary['unknown_fraction']:.3%})",
    }
    if middle := summary.get("fill_in_middle"):
        rows["fill-in-the-middle"] = _rearranged(middle, summary["documents"])
    lines = [str(prefix), f"  {summary['inputs']}"]
    for name, value in rows.items():
        lines += [f"  {name:<18} {value}", *(_skipped(prefix, summary) if name == "skipped documents" else []),
                  *(_near_samples(prefix, summary["near_duplicates"]) if name == "near-duplicates" else [])]
    return "\n".join([*lines, "  documents by number of tokens", *_histogram(summary["document_lengths"]),
                      *source_lines(summary["sources"], f"{prefix}.summary.json")])


def _rearranged(middle: Mapping[str, Any], num_documents: int) -> str:
    count, in_parts = middle["documents"], middle["documents_read_in_parts"]
    return f"{count:,} documents ({count / max(num_documents, 1):.1%})" + (
        f"; {in_parts:,} long ones are read in parts, and not rearranged" if in_parts else "")


def _skipped(prefix: str | Path, summary: Mapping[str, Any]) -> list[str]:
    samples = summary["skipped_samples"]
    lines = [f"    {sample['place']}: {sample['reason']}" for sample in samples[:_SHOWN_PLACES]]
    if summary["skipped_documents"] > len(lines):
        lines.append(f"    ... the first {len(samples)} are in {prefix}.summary.json")
    return lines


def _near(near: Mapping[str, Any]) -> str:
    text = f"{near['documents']:,} of similarity {near['threshold']:g} or more"
    return text + f" ({'removed' if near['removed'] else 'kept'}; {near['tokens']:,} tokens)" * bool(near["documents"])


def _near_samples(prefix: str | Path, near: Mapping[str, Any]) -> list[str]:
    samples = near["samples"]
    lines = [f"    {sample['place']}: {sample['similarity']:.2f} like {sample['earlier']}"
             for sample in samples[:_SHOWN_PLACES]]
    if near["documents"] > len(lines):
        lines.append(f"    ... the first {len(samples)} are in {prefix}.summary.json")
    return lines


def _histogram(lengths: Mapping[str, int]) -> list[str]:
    most = max(lengths.values(), default=0)
    width = max(map(len, lengths), default=0)
    return [f"    {name:>{width}} {count:>12,} {'#' * -(-_BAR * count // most)}".rstrip()
            for name, count in lengths.items()]
