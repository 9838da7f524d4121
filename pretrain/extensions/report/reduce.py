"""The reduction of many rows to a few points with the minimum, maximum and mean."""

import math

import numpy as np

from pretrain.analysis.run_table import Curves

_MAX_SEGMENTS = 100  # of abandoned rows; the newest are kept
_DIGITS = 7  # significant digits of the points of reduced curves


def reduce_rows(columns: dict[str, np.ndarray], limit: int) -> Curves:
    """Return the rows themselves if there are at most `limit`, else at most a quarter as many buckets of rows.

    Three quarters of the buckets have the same number of rows. The others become smaller towards the first row, so that
    a logarithmic axis shows the start of a run.
    """
    num_rows = len(next(iter(columns.values()), ()))
    if num_rows <= limit:
        return Curves(columns)
    even, fine = max(limit * 3 // 16, 1), max(limit // 16, 1)
    starts = np.unique(np.concatenate([np.linspace(0, num_rows, even, endpoint=False),
                                       np.geomspace(1, num_rows, fine, endpoint=False) - 1]).astype(np.int64))
    curves = Curves({})
    for key, column in columns.items():
        low, mean, high = _reduce_column(column, starts)
        curves.values[key] = mean
        if np.any((low < high)[np.isfinite(mean)]):
            curves.low[key], curves.high[key] = low, high
    return curves


def _reduce_column(column: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return minimum, mean and maximum of each bucket without its NaN; NaN if it has only NaN."""
    finite = np.isfinite(column)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, column, 0.0), starts)
    mean = np.divide(sums, counts, out=np.full(len(starts), math.nan), where=counts > 0)
    low, high = np.fmin.reduceat(column, starts), np.fmax.reduceat(column, starts)
    return low, np.clip(mean, low, high), high  # the rounding of a sum must not leave the range


def reduce_segments(columns: dict[str, np.ndarray], rows: np.ndarray, limit: int) -> Curves:
    """Return the rows with the numbers `rows` as curves with a gap (NaN) after each segment of consecutive rows."""
    if len(rows) == 0:
        return Curves({})
    segments = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)[-_MAX_SEGMENTS:]
    total = sum(map(len, segments))
    parts = [reduce_rows({key: column[segment] for key, column in columns.items()},
                         max(limit * len(segment) // total, 8)) for segment in segments]
    gap = np.array([math.nan])
    return Curves({key: np.concatenate([part for curves in parts for part in (curves.values[key], gap)])
                   for key in columns})


def as_numbers(values: np.ndarray, *, rounded: bool) -> list[float | int | None]:
    """Return values for JSON: null for NaN, and whole numbers without a decimal point."""
    numbers: list[float | int | None] = []
    for value in values.tolist():
        if not math.isfinite(value):
            numbers.append(None)
            continue
        number = float(f"{value:.{_DIGITS}g}") if rounded else value
        numbers.append(int(number) if number.is_integer() and abs(number) < 2**53 else number)
    return numbers
