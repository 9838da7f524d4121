"""Hints and expected losses, which extensions find for the curve of a run folder."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.analysis.run_table import Columns, Curves, RunTable, as_float, kept_evaluations, kept_rows
from pretrain.monitor.curve import (
    EVALUATION_KEYS,
    KEYS,
    Curve,
    Expectation,
    Expected,
    Facts,
    Hint,
    expectation_of,
    hints_of_extensions,
    tokens_text,
)

_MOST_POINTS = 300
_ROWS = 8  # newest rows, whose median is the measured loss, as in the events


def hints_of(table: RunTable) -> list[Hint]:
    """Return what the curve of a run shows: the most important first; none if there are no rows.

    Steps that were trained again later do not count.
    """
    valid, kept = table.evaluations.get("valid", Columns()), kept_rows(table.training)
    newest = kept_evaluations(valid, table.training)
    curve = Curve({key: table.training.column(key)[kept] for key in KEYS},
                  {key: valid.column(key)[newest] for key in EVALUATION_KEYS})
    return hints_of_extensions(curve, Facts.of_record(table.starts[-1] if table.starts else {}))


@dataclass(frozen=True)
class Comparison:
    """The newest losses of a run next to the expected one."""

    tokens: float
    expected: Expected
    measured: float  # training loss, median of 8 rows
    remark: str = ""

    def __str__(self) -> str:
        remark = f"; {self.remark}" if self.remark else ""
        return f"{self.expected} at {tokens_text(self.tokens)}, training loss {self.measured:.4f}{remark}"

    @property
    def interval_text(self) -> str:
        """Everything but the expected loss itself."""
        low, high = self.expected.low, self.expected.high
        return f"{low:.4f} to {high:.4f} at {tokens_text(self.tokens)}; training loss {self.measured:.4f}"


def expected_curve(table: RunTable, curves: Curves) -> Curves:
    """Return the expected loss, with its interval, at some of the positions of the training curves; {}: not known."""
    expectation, first_tokens = _expectation(table)
    if expectation is None or "consumed_tokens" not in curves.values:
        return Curves({})
    tokens = curves.values["consumed_tokens"] - first_tokens
    rows = np.unique(np.linspace(0, max(len(tokens) - 1, 0), min(len(tokens), _MOST_POINTS)).astype(int))
    found = {int(row): at for row in rows if (at := _at(expectation, float(tokens[row]))) is not None}
    if not found:
        return Curves({})
    loss, low, high = (np.array([getattr(at, name) for at in found.values()]) for name in ("loss", "low", "high"))
    positions: dict[str, np.ndarray] = {
        key: curves.values[key][list(found)] for key in ("step", "consumed_tokens", "elapsed")
        if key in curves.values}
    return Curves({**positions, "loss": loss}, {"loss": low}, {"loss": high})


def expected_of_run(table: RunTable) -> Curves:
    """Return the expected loss by step and tokens, with its interval; {}: not known."""
    kept = kept_rows(table.training)
    return expected_curve(table, Curves({key: table.training.column(key)[kept] for key in ("step", "consumed_tokens")}))


def newest_comparison(table: RunTable) -> Comparison | None:
    """Compare the newest losses within the curve; None: the run has no curve, or no row within it."""
    expectation, first_tokens = _expectation(table)
    if expectation is None:
        return None
    kept = kept_rows(table.training) & np.isfinite(table.training.column("loss"))
    tokens, losses = (table.training.column(key)[kept] for key in ("consumed_tokens", "loss"))
    for last in range(len(tokens), 0, -1):
        expected = _at(expectation, float(tokens[last - 1]) - first_tokens)
        if expected is not None:
            return Comparison(float(tokens[last - 1]), expected, float(np.median(losses[max(last - _ROWS, 0):last])),
                              expectation.remark)
    return None


def _expectation(table: RunTable) -> tuple[Expectation | None, float]:
    """Return what is expected of the newest start, and the tokens of the data before the run's first one."""
    start: dict[str, Any] = table.starts[-1] if table.starts else {}
    flags = start.get("flags") or {}
    first = as_float(flags.get("first_sample") or 0) * as_float(flags.get("seq_length") or 0)
    return expectation_of(start, table.events), first if math.isfinite(first) else 0.0


def _at(expectation: Expectation, tokens: float) -> Expected | None:
    return expectation.at(tokens) if math.isfinite(tokens) and tokens > 0 else None
