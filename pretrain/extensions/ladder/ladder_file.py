"""The file ladder.json: the trained points, the laws that fit them, and the expected losses of the target's run.

A law of the loss is L(N, D) = e + a / N^alpha + b / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3). N is
the number of parameters, D the number of training tokens, L the loss in nats a token. A law predicts with the Python
library alone; fit.py makes it from points, with scipy.

`Reach` is how far a prediction lies beyond the points of the law. The limits of what is predicted are from backtests on
four published families (README.md, Backtests). Up to 10 times beyond the fitted points, the errors were at most 4%, and
92% of the losses lay in the 90% intervals; further, errors of 6.5% were seen. Nothing was tested beyond 58 times.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import erf, exp, isfinite, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.errors import format_number
from pretrain.extensions.ladder.expected_curve import FORMAT, LEVEL, Target
from pretrain.monitor.curve import Expected

if TYPE_CHECKING:
    import numpy as np

LARGEST_EXPONENT = 3.0  # largest exponent of alpha and beta; published ones are 0.05 to 0.7
SMALLEST_TERM = -12.0  # logarithm of e, and of the other terms at the centre of the points: 6e-6 nats
_NEAR = 1.01
_FEWEST_DEGREES = 2  # fewest degrees of freedom, of a variance that is drawn
_LARGEST_RATIO = 5.0  # largest ratio of a drawn standard deviation to the estimated one
DECAYED, STABLE = "decayed", "stable"  # keys of `laws`
WARN_FACTOR = 10.0
LARGEST_FACTOR = 50.0


@dataclass(frozen=True)
class Law:
    """The law with its uncertainty."""

    e: float  # nats a token: the loss that no model and no amount of data falls below
    a: float
    b: float
    alpha: float
    beta: float
    noise: float = 0.0  # standard deviation of the logarithm of the loss around the law
    samples: list[list[float]] = field(default_factory=list)  # [e, a, b, alpha, beta], fitted to resampled points

    def __post_init__(self) -> None:
        for numbers in (self._constants(), *self.samples):
            if len(numbers) != 5 or not all(isfinite(each) and each >= 0 for each in numbers) \
                    or not sum(numbers[:3]) or max(numbers[3:]) > LARGEST_EXPONENT:
                raise ValueError("a law has other numbers than e, a, b (at least 0, not all 0), alpha and beta (0 to "
                                 f"{LARGEST_EXPONENT:g})")
        if not (isfinite(self.noise) and self.noise >= 0):
            raise ValueError("the noise of a law is not a finite number of at least 0")

    def _constants(self) -> list[float]:
        return [self.e, self.a, self.b, self.alpha, self.beta]

    def at_bounds(self) -> list[str]:
        """Return what the points do not determine: the fit stopped at the bound of these constants."""
        at_bound = self.e < _NEAR * exp(SMALLEST_TERM)
        found = ["e: the points show no loss that a run cannot fall below"] if at_bound else []
        return found + [f"{name}: it is at most {LARGEST_EXPONENT:g} here" for name, value in
                        (("alpha", self.alpha), ("beta", self.beta)) if value * _NEAR > LARGEST_EXPONENT]

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss L(N, D) in nats a token."""
        return _loss(self._constants(), parameters, tokens)

    def predict(self, parameters: float, tokens: float) -> Expected:
        """Return L(N, D) with its interval: uncertainty of the law, and noise of a run around it."""
        loss = self.loss(parameters, tokens)
        return interval(loss, [log(_loss(each, parameters, tokens)) for each in self.samples] or [log(loss)],
                        self.noise)


def _loss(constants: list[float], parameters: float, tokens: float) -> float:
    e, a, b, alpha, beta = constants
    return e + a / parameters**alpha + b / tokens**beta


@dataclass(frozen=True)
class Variance:
    """A variance that is estimated from a sum of squares."""

    squares: float
    degrees: int  # degrees of freedom

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


@dataclass(frozen=True)
class Point:
    """The validation loss of a model after a number of tokens."""

    run: str
    parameters: float  # see counted_parameters
    tokens: float  # that the model was trained with
    loss: float  # nats a token
    decayed: bool = True  # at the end of the learning rate's decay; False: in the stable phase of WSD
    held_out: bool = False  # the fit does not use it


@dataclass(frozen=True)
class Range:
    """Smallest and largest values of the fitted points."""

    parameters: list[float]
    tokens: list[float]

    @staticmethod
    def of(points: Iterable[Point]) -> "Range":
        fitted = [point for point in points if not point.held_out]
        parameters, tokens = [point.parameters for point in fitted], [point.tokens for point in fitted]
        return Range([min(parameters), max(parameters)], [min(tokens), max(tokens)])


@dataclass(frozen=True)
class Ladder:
    """The content of ladder.json."""

    corpus: dict[str, str]  # see corpus_of
    vocab_size: int
    family: str  # model_type
    scaling: str  # scaling of the learning rate with the width: "standard" or "mup"
    points: list[Point]
    laws: dict[str, Law]
    range: Range
    target: Target
    format: str = FORMAT


def write_ladder(path: Path, ladder: Ladder) -> None:
    """Write ladder.json atomically. Raises OSError."""
    write_atomically(path, json.dumps(asdict(ladder), indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Reach:
    """Factors by which a model and its tokens lie outside of the range of the points; 1 within it."""

    parameters: float
    tokens: float

    @staticmethod
    def of(fitted: Range, parameters: float, tokens: float) -> "Reach":
        return Reach(_factor(fitted.parameters, parameters), _factor(fitted.tokens, tokens))

    @property
    def factor(self) -> float:
        return max(self.parameters, self.tokens)

    def problem(self) -> str:
        """Return why the prediction is rejected; "" if it is not."""
        return f"{self}: {LARGEST_FACTOR:g} times is the limit" if self.factor > LARGEST_FACTOR else ""

    def warning(self) -> str:
        """Return a warning about the prediction; "" up to WARN_FACTOR."""
        if self.factor <= WARN_FACTOR:
            return ""
        return f"{self}: further than {WARN_FACTOR:g} times, backtests had errors of up to 6.5%"

    def __str__(self) -> str:
        return (f"the prediction is {format_number(self.parameters)} times beyond the fitted points in parameters, and "
                f"{format_number(self.tokens)} times in tokens")


def _factor(limits: list[float], value: float) -> float:
    low, high = limits
    return max(1.0, value / high, low / value)
