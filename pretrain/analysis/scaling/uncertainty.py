"""Intervals of predictions: a variance that is known from few residuals, and quantiles of a mixture of normals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, exp, sqrt
from typing import TYPE_CHECKING

from pretrain.config.expected_curve import LEVEL, Expected

if TYPE_CHECKING:
    import numpy as np

_FEWEST_DEGREES = 2  # of freedom, of a variance that is drawn
_LARGEST_RATIO = 5.0  # of a drawn standard deviation to the estimated one


@dataclass(frozen=True)
class Variance:
    """A variance that is estimated from a sum of squares."""

    squares: float
    degrees: int  # of freedom

    @property
    def value(self) -> float:
        return self.squares / self.degrees

    def draw(self, random: "np.random.Generator") -> float:
        """Return a standard deviation that these squares are consistent with."""
        degrees = max(_FEWEST_DEGREES, self.degrees)
        return sqrt(self.value) * min(_LARGEST_RATIO, sqrt(degrees / float(random.chisquare(degrees))))


def interval(loss: float, logs: Sequence[float], noise: float) -> Expected:
    """Return a predicted loss with its interval.

    The logarithm of the loss is taken as a mixture of normal distributions: one around each of `logs`, with the
    standard deviation `noise`. The interval lies between two quantiles of the mixture.
    """
    low, high = (exp(_quantile(logs, noise, q)) for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Expected(loss, min(low, loss), max(high, loss))


def _quantile(centers: Sequence[float], deviation: float, probability: float) -> float:
    """Return a quantile of the mixture of normal distributions around the centers."""
    if deviation == 0:
        ordered = sorted(centers)
        return ordered[round(probability * (len(ordered) - 1))]
    low, high = min(centers) - 6 * deviation, max(centers) + 6 * deviation
    return _bisect(lambda x: sum(1 + erf((x - c) / (deviation * sqrt(2))) for c in centers) / 2 / len(centers),
                   probability, low, high)


def _bisect(function: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Return where an increasing function has the value."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return (low + high) / 2
