"""Statistics of noisy columns of numbers, such as the losses or the step times of a run."""

import math
from dataclasses import dataclass

import numpy as np

_BUCKETS = 16  # groups of consecutive values, whose means show what is slower than the noise from row to row
NORMAL_MAD = 0.6745  # median of the absolute value of a standard normal variable


def error_of_mean(means: np.ndarray) -> float:
    """Return the standard error of the mean of a row of `means`, whose values are autocorrelated.

    The noise is taken as an AR(1) process. The estimate of its autocorrelation r from n values around a line is too
    small, by about (1 + 4 r) / n (Marriott and Pope 1954 without the line).
    """
    n = means.shape[1]
    x = np.arange(n) - (n - 1) / 2
    deviations = means - means.mean(axis=1, keepdims=True)
    residuals = deviations - np.outer(deviations @ x / (x @ x), x)
    variance = float((residuals ** 2).sum(axis=1).mean()) / (n - 2)
    products = float((residuals[:, 1:] * residuals[:, :-1]).sum(axis=1).mean()) / (n - 2)
    r = products / variance if variance > 0 else 0.0
    r = min(max(r + (1 + 4 * r) / n, 0.0), 0.95)
    return math.sqrt(variance * (1 + r) / (1 - r) / n)


def change_point(values: np.ndarray, count: int) -> int:
    """Return from which value on a noisy column has about the level of its newest `count` values, which is above 0.

    It is the first of the newest values whose sum lies farthest above half of this level.
    """
    sums = np.cumsum((values - 0.5 * np.median(values[-count:]))[::-1])
    return len(values) - 1 - int(np.argmax(sums))


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error."""

    value: float
    error: float


def bucket_means(values: np.ndarray) -> np.ndarray:
    """Return the means of at most 16 groups of consecutive values, of nearly equal sizes."""
    edges = np.linspace(0, len(values), min(_BUCKETS, len(values)) + 1).astype(int)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def line(x: np.ndarray, y: np.ndarray) -> tuple[Estimate, Estimate]:
    """Fit a line. Returns its slope, and its value at the mean of x. Needs at least 3 values.

    The errors follow from the residuals of means of consecutive values, so that slow fluctuations count.
    """
    x, y = bucket_means(x), bucket_means(y)
    deviations = x - x.mean()
    spread = float(deviations @ deviations)
    slope = float(deviations @ y) / spread
    residuals = y - y.mean() - slope * deviations
    sd = math.sqrt(float(residuals @ residuals) / (len(x) - 2))
    return Estimate(slope, sd / math.sqrt(spread)), Estimate(float(y.mean()), sd / math.sqrt(len(x)))


def level(y: np.ndarray) -> Estimate:
    """Return the mean of values that may follow a line."""
    return line(np.arange(len(y), dtype=np.float64), y)[1]
