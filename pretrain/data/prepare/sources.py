"""Counts of the documents of each source: each word of the command line that names inputs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pretrain.data.prepare.text_quality import FIELDS, quality_summary, sampled_fraction
from pretrain.data.text_inputs.find import Input


@dataclass(frozen=True)
class InputFile:
    """Name and source of an input, for the places and counts of its documents."""

    name: str
    source: str
    has_rows: bool

    def place(self, line: int) -> str:
        return f"{self.name}: row {line}" if self.has_rows else f"{self.name}:{line}"


def input_file(found: Input) -> InputFile:
    return InputFile(found.name, found.source or found.name, found.kind in ("parquet", "rows"))


def sampled_fractions(inputs: Sequence[Input]) -> tuple[float, ...]:
    """Return the fraction of the documents of each input that are measured. It depends on the size of its source."""
    sizes: Counter[str] = Counter()
    for found in inputs:
        sizes[found.source] += found.num_bytes
    return tuple(sampled_fraction(sizes[found.source], len(sizes)) for found in inputs)


@dataclass
class SourceCounts:
    """Counts of a source. Documents are those that were written; the quality is of the documents that were read."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    quality: list[int] = field(default_factory=lambda: [0] * len(FIELDS))

    def add_quality(self, counts: Sequence[int]) -> None:
        self.quality = [before + new for before, new in zip(self.quality, counts, strict=True)]


def source_rows(sources: Mapping[str, SourceCounts], *, duplicates_counted: bool) -> list[dict[str, Any]]:
    """Return what the summary says about each source."""
    rows = []
    for name, counts in sources.items():
        values = {key: value for key, value in asdict(counts).items() if key != "quality"}
        rows.append({"source": name, **values, "duplicates": counts.duplicates if duplicates_counted else None,
                     "bytes_per_token": round(counts.text_bytes / max(counts.tokens, 1), 4),
                     "tokens_per_document": round(counts.tokens / max(counts.documents, 1), 1),
                     "quality": quality_summary(counts.quality)})
    return rows


_SHOWN = 5
_NAME_WIDTH = 26
_COLUMNS = {"documents": 11, "tokens": 15, "B/token": 8, "letters": 8, "repeated": 9}


def source_lines(rows: Sequence[Mapping[str, Any]], rest: str) -> list[str]:
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
