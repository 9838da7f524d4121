"""The law of the loss, L(N, D) = e + a / N^alpha + b / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3).

N is the number of parameters, D the number of training tokens, L the loss in nats a token. A law predicts with the
Python library alone; fit.py makes it from points, with scipy.
"""

from dataclasses import dataclass, field
from math import exp, isfinite, log

from pretrain.analysis.scaling.uncertainty import interval
from pretrain.config.expected_curve import LEVEL as LEVEL
from pretrain.config.expected_curve import Expected as Expected
from pretrain.config.expected_curve import counted_parameters as counted_parameters

LARGEST_EXPONENT = 3.0  # of alpha and beta; published ones are 0.05 to 0.7
SMALLEST_TERM = -12.0  # logarithm of e, and of the other terms at the centre of the points: 6e-6 nats
_NEAR = 1.01


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
