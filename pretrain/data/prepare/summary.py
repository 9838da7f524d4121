"""The summary of a prepared data set: PREFIX.summary.json, and the same as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.data.prepare.statistics import Statistics
from pretrain.stored_json import read_object

_BAR = 40  # characters
_SHOWN_PLACES = 5


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
        "bytes_per_token": round(statistics.text_bytes / tokens, 4),
        "entropy_nats": entropy_nats,
        "longest_document": {"tokens": statistics.longest_tokens, "place": statistics.longest_place},
        "empty_documents": statistics.empty,
        "skipped_documents": statistics.skipped,
        "skipped_samples": [{"place": place, "reason": reason} for place, reason in statistics.skipped_samples],
        "duplicate_documents": statistics.duplicates if duplicates_counted else None,
        "duplicates_removed": deduplicated,
        "unknown_tokens": unknown,
        "unknown_fraction": unknown / tokens,
        "document_lengths": statistics.length_histogram(),
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
        "unknown tokens": f"{summary['unknown_tokens']:,} ({summary['unknown_fraction']:.3%})",
    }
    lines = [str(prefix), f"  {summary['inputs']}"]
    for name, value in rows.items():
        lines += [f"  {name:<18} {value}", *(_skipped(prefix, summary) if name == "skipped documents" else [])]
    return "\n".join([*lines, "  documents by number of tokens", *_histogram(summary["document_lengths"])])


def _skipped(prefix: str | Path, summary: Mapping[str, Any]) -> list[str]:
    samples = summary["skipped_samples"]
    lines = [f"    {sample['place']}: {sample['reason']}" for sample in samples[:_SHOWN_PLACES]]
    if summary["skipped_documents"] > len(lines):
        lines.append(f"    ... the first {len(samples)} are in {prefix}.summary.json")
    return lines


def _histogram(lengths: Mapping[str, int]) -> list[str]:
    most = max(lengths.values())
    width = max(map(len, lengths))
    return [f"    {name:>{width}} {count:>12,} {'#' * -(-_BAR * count // most)}".rstrip()
            for name, count in lengths.items()]
