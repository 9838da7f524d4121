"""The law of the loss, L(N, D) = e + a / N^alpha + b / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3).

N is the number of parameters, D the number of training tokens, L the loss in nats a token. A law predicts with the
Python library alone; fit.py makes it from points, with scipy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import erf, exp, isfinite, log, sqrt

from pretrain.config.expected_curve import LEVEL, Expected
from pretrain.config.expected_curve import counted_parameters as counted_parameters

LARGEST_EXPONENT = 3.0  # of alpha and beta; published ones are 0.05 to 0.7


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

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss L(N, D) in nats a token."""
        return _loss(self._constants(), parameters, tokens)

    def predict(self, parameters: float, tokens: float) -> Expected:
        """Return L(N, D) with its interval: uncertainty of the law, and noise of a run around it.

        The logarithm of the loss is taken as a mixture of normal distributions: one around the value of each sample,
        with the standard deviation `noise`. The interval lies between two quantiles of the mixture.
        """
        loss = self.loss(parameters, tokens)
        logs = [log(_loss(each, parameters, tokens)) for each in self.samples] or [log(loss)]
        low, high = (exp(_quantile(logs, self.noise, q)) for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        return Expected(loss, min(low, loss), max(high, loss))


def _loss(constants: list[float], parameters: float, tokens: float) -> float:
    e, a, b, alpha, beta = constants
    return e + a / parameters**alpha + b / tokens**beta


def _quantile(centers: list[float], deviation: float, probability: float) -> float:
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
