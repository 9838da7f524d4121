"""The expected curve of a run (--expected_curve) at its rows, from run.json."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.analysis.report.reduce import Curves, kept_rows
from pretrain.analysis.report.run_table import RunTable, as_float
from pretrain.config.expected_curve import Expected, Target, target_of_record, tokens_text
from pretrain.monitor.expected.curve_watch import OFF_CURVE, ON_CURVE
from pretrain.monitor.read_run_folder import is_number

_MOST_POINTS = 300
_ROWS = 8  # newest rows, whose median is the measured loss, as in the events


@dataclass(frozen=True)
class Comparison:
    """The newest losses of a run next to the expected one."""

    tokens: float
    expected: Expected
    measured: float  # training loss, median of 8 rows; a ladder predicts the validation loss
    off_since: int | None = None  # about the first step off the curve, by the newest event; None: it is on the curve

    def __str__(self) -> str:
        off = f"; off the curve since about step {self.off_since}" if self.off_since is not None else ""
        return f"{self.expected} at {tokens_text(self.tokens)}, training loss {self.measured:.4f}{off}"

    @property
    def interval_text(self) -> str:
        """Everything but the expected loss itself."""
        low, high = self.expected.low, self.expected.high
        return f"{low:.4f} to {high:.4f} at {tokens_text(self.tokens)}; training loss {self.measured:.4f}"


def expected_curve(table: RunTable, curves: Curves) -> Curves:
    """Return the expected loss, with its interval, at some of the positions of the training curves; {}: not known."""
    target, first_tokens = _target(table)
    if target is None or "consumed_tokens" not in curves.values:
        return Curves({})
    tokens = curves.values["consumed_tokens"] - first_tokens
    rows = np.unique(np.linspace(0, max(len(tokens) - 1, 0), min(len(tokens), _MOST_POINTS)).astype(int))
    found = {int(row): at for row in rows if (at := _at(target, float(tokens[row]))) is not None}
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
    target, first_tokens = _target(table)
    if target is None:
        return None
    kept = kept_rows(table.training) & np.isfinite(table.training.column("loss"))
    tokens, losses = (table.training.column(key)[kept] for key in ("consumed_tokens", "loss"))
    for last in range(len(tokens), 0, -1):
        expected = _at(target, float(tokens[last - 1]) - first_tokens)
        if expected is not None:
            return Comparison(float(tokens[last - 1]), expected, float(np.median(losses[max(last - _ROWS, 0):last])),
                              _off_since(table))
    return None


def _off_since(table: RunTable) -> int | None:
    changes = (event for event in reversed(table.events) if event.get("event") in (OFF_CURVE, ON_CURVE))
    newest: dict[str, Any] = next(changes, {})
    since = newest.get("since", newest.get("step"))
    return int(since) if newest.get("event") == OFF_CURVE and is_number(since) else None


def _target(table: RunTable) -> tuple[Target | None, float]:
    """Return the expected curve of the newest start, and the tokens of the data before the run's first one."""
    start: dict[str, Any] = table.starts[-1] if table.starts else {}
    record, flags = start.get("expected_curve"), start.get("flags") or {}
    if not isinstance(record, dict):
        return None, 0.0
    first = as_float(flags.get("first_sample") or 0) * as_float(flags.get("seq_length") or 0)
    return target_of_record(record), first if math.isfinite(first) else 0.0


def _at(target: Target, tokens: float) -> Expected | None:
    return target.at(tokens) if math.isfinite(tokens) and tokens > 0 else None
