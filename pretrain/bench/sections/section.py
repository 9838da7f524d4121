"""BenchSection: the result of one section, and the statistics that sections share."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class BenchSection:
    """Table and figures of one section."""

    name: str  # a choice of --what, or "profile"
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # one line for each failed baseline
    data: dict[str, Any] = field(default_factory=dict)  # figures for --json
    page_rows: list[list[str]] | None = None  # rows in a page, if they are fewer


def spread(values: list[float]) -> float:
    """Return (highest - lowest) / median of a value over the repetitions."""
    return (max(values) - min(values)) / statistics.median(values)
