"""Fit the law of the loss to points, with scipy (Hoffmann et al. 2022, arXiv 2203.15556, approach 3).

The constants minimize the sum of the Huber losses of log L. A sum, and small tolerances: with a mean of losses this
small, L-BFGS stopped early (Besiroglu et al. 2024, arXiv 2404.10102, section 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, isfinite, log, sqrt
from typing import Any

import numpy as np

from pretrain.errors import ConfigError
from pretrain.extensions.ladder.ladder_file import LARGEST_EXPONENT, SMALLEST_TERM, Law, Point, Variance

HUBER_DELTA = 1e-3  # in log L
FEWEST_VALUES = 3  # fewest values of N, and of D: the term of each has two constants, and e is the third
SMALLEST_SPREAD = 0.15  # spread of log(D) around a line in log(N), and of log(N) around a line in log(D)
HIDDEN_SIZES = 0.2  # part of the sizes that the fit hides, to see how well it predicts them
_STARTS = 6  # starts from the grid, those with the lowest objective
_PARTS_OF_E, _PARTS_OF_A = (0.1, 0.3, 0.5, 0.7, 0.9), (0.2, 0.5, 0.8)  # parts of the mean loss, and of the rest
_EXPONENTS = (0.1, 0.2, 0.35, 0.5, 0.8, 1.2)
_NO_TERM = -60.0
_LARGEST_TERM = 20.0  # largest logarithm of the term of D at the centre of the points, in either direction


def scipy_function(name: str) -> Callable[..., Any]:
    """Return a function of scipy.optimize. Raises ConfigError without scipy."""
    try:
        import scipy.optimize
    except ImportError:
        raise ConfigError("scipy", problem="the fit of a scaling law needs it, and it is not installed",
                          remedy="pip install 'ds-pretrain[ladder]'") from None
    function: Callable[..., Any] = getattr(scipy.optimize, name)
    return function


@dataclass(frozen=True)
class _Data:
    """Logarithms of the points, and the size that each belongs to."""

    n: np.ndarray  # log(N) without its mean
    d: np.ndarray  # log(D) without its mean; zeros without a term of D
    loss: np.ndarray  # log(L)
    size: np.ndarray  # index of N
    centre: tuple[float, float]  # means of log(N) and log(D)
    size_only: bool

    @property
    def sizes(self) -> int:
        return int(self.size.max()) + 1

    @property
    def constants(self) -> int:
        return 3 if self.size_only else 5


def fit_law(points: Sequence[Point], *, seed: int = 0, resamples: int = 100, size_only: bool = False) -> Law:
    """Fit the law to the points that are not held out.

    The intervals of the law come from `resamples` further fits, to the fitted losses plus drawn residuals (parametric
    bootstrap). The points of one size, which are correlated, have a residual in common. Drawing the points
    themselves, or their runs, would often leave too few sizes: a ladder has four to eight. `noise` is the standard
    deviation of the residuals, or the error with which the law of the smaller models predicts the largest ones if that
    is larger: residuals do not show that the loss has another form than the law.

    size_only: fit L(N) = e + a / N^alpha, for points whose tokens are equal, or a function of N. This law holds for
        models with the same function only.

    Raises ValueError, which says what is missing, if the points do not determine the constants; ConfigError without
    scipy.
    """
    minimize = scipy_function("minimize")
    data = _read(points, size_only)
    best = _fit(minimize, data, data.loss, _starts(data))
    fitted, variances = _log_loss(best, data), _variances(best, data)
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(resamples):
        of_sizes, of_points = (random.standard_normal(count) * each.draw(random)
                               for count, each in zip((data.sizes, len(fitted)), variances, strict=True))
        samples.append(_constants(_fit(minimize, data, fitted + of_sizes[data.size] + of_points, [best]), data))
    noise = max(sqrt(sum(each.value for each in variances)), _error_of_largest(minimize, points, size_only))
    return _law(best, data, noise=noise, samples=samples)


def compute_optimal(law: Law, flops: float) -> tuple[float, float]:
    """Return the N and D of the lowest loss for C = 6 N D floating-point operations (Hoffmann et al., equation 4).

    Raises ValueError if the law has no such optimum.
    """
    if not min(law.a, law.b, law.alpha, law.beta) > 0:
        raise ValueError("the law has no compute-optimal size: the loss does not fall with both parameters and tokens")
    if not (isfinite(flops) and flops > 0):
        raise ValueError("the number of floating-point operations is not a finite number above 0")
    total = law.alpha + law.beta
    g = (law.alpha * law.a / (law.beta * law.b)) ** (1 / total)
    parameters = g * (flops / 6) ** (law.beta / total)
    return parameters, flops / 6 / parameters


def depends_on_size(points: Sequence[Point]) -> bool:
    """Return whether the tokens are equal, or a power of N: the terms of N and D cannot be separated then."""
    n, d = (np.log([getattr(point, key) for point in points]) for key in ("parameters", "tokens"))
    n, d = n - n.mean(), d - d.mean()
    return any(float(np.std(across - (across @ along) / max(along @ along, 1e-12) * along)) < SMALLEST_SPREAD
               for across, along in ((n, d), (d, n)))


def _read(points: Sequence[Point], size_only: bool) -> _Data:
    """Check the points. Raises ValueError if they cannot determine the constants."""
    fitted = [point for point in points if not point.held_out]
    for point in fitted:
        if not all(isfinite(each) and each > 0 for each in (point.parameters, point.tokens, point.loss)):
            raise ValueError(f"a point of run {point.run} has parameters, tokens or a loss that are not above 0")
    needed = ["parameters"] if size_only else ["parameters", "tokens"]
    for name in needed:
        count = len({getattr(point, name) for point in fitted})
        if count < FEWEST_VALUES:
            raise ValueError(f"the points to fit have {count} different numbers of {name}; the law needs at least "
                             f"{FEWEST_VALUES}")
    constants = 3 if size_only else 5
    if len(fitted) <= constants:
        raise ValueError(f"there are {len(fitted)} points to fit; the {constants} constants of the law need at least "
                         f"{constants + 1}")
    if not size_only and depends_on_size(fitted):
        raise ValueError("the tokens of the points are a function of their parameters, such as 20 tokens a parameter: "
                         "the terms of N and D cannot be separated; add points with other numbers of tokens for the "
                         "same models")
    n, d, loss = (np.log([getattr(point, key) for point in fitted]) for key in ("parameters", "tokens", "loss"))
    centre = float(n.mean()), float(d.mean())
    _, size = np.unique(n, return_inverse=True)
    return _Data(n - centre[0], np.zeros_like(d) if size_only else d - centre[1], loss, size, centre, size_only)


def _starts(data: _Data) -> list[np.ndarray]:
    """Return starts of a grid: parts of the mean loss for e and the terms of N and D, and exponents."""
    mean = exp(float(data.loss.mean()))
    of_tokens = ((1.0, 0.0),) if data.size_only else tuple(product(_PARTS_OF_A, _EXPONENTS))
    grid = [np.array([log(mean * e), log(mean * (1 - e) * a),
                      _NO_TERM if data.size_only else log(mean * (1 - e) * (1 - a)), alpha, beta])
            for e, alpha, (a, beta) in product(_PARTS_OF_E, _EXPONENTS, of_tokens)]
    return sorted(grid, key=lambda start: _objective(start, data, data.loss)[0])[:_STARTS]


def _fit(minimize: Callable[..., Any], data: _Data, log_losses: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Return [log e, log a', log b', alpha, beta] of the lowest objective; a' and b' are terms at the data's centre."""
    largest = float(log_losses.max())
    bounds = [(SMALLEST_TERM, largest)] * 3 + [(0.0, LARGEST_EXPONENT)] * 2
    if data.size_only:
        bounds[2], bounds[4] = (_NO_TERM, _NO_TERM), (0.0, 0.0)
    found = []
    for x in starts:
        for delta in (0.1, HUBER_DELTA):  # first with a smooth objective
            result = minimize(_objective, x, args=(data, log_losses, delta), jac=True, method="L-BFGS-B", bounds=bounds,
                              options={"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9})
            x = result.x
        found.append((float(result.fun), x))
    return min(found, key=lambda each: each[0])[1]


def _objective(x: np.ndarray, data: _Data, log_losses: np.ndarray,
               delta: float = HUBER_DELTA) -> tuple[float, np.ndarray]:
    """Return the sum of the Huber losses of log L, divided by delta^2, and its gradient."""
    terms = _log_terms(x, data)
    largest = terms.max(axis=0)
    parts = np.exp(terms - largest)
    total = parts.sum(axis=0)
    residuals = (largest + np.log(total) - log_losses) / delta
    size = np.abs(residuals)
    value = np.where(size <= 1, residuals**2 / 2, size - 0.5).sum()
    slopes = np.clip(residuals, -1, 1) / delta * (parts / total)
    gradient = np.array([*slopes.sum(axis=1), -(slopes[1] @ data.n), -(slopes[2] @ data.d)])
    return float(value), gradient


def _log_terms(x: np.ndarray, data: _Data) -> np.ndarray:
    return np.stack([np.full_like(data.n, x[0]), x[1] - x[3] * data.n, x[2] - x[4] * data.d])


def _log_loss(x: np.ndarray, data: _Data) -> np.ndarray:
    result: np.ndarray = np.logaddexp.reduce(_log_terms(x, data))
    return result


def _constants(x: np.ndarray, data: _Data) -> list[float]:
    """Return [e, a, b, alpha, beta]."""
    e, a, b, alpha, beta = map(float, x)
    return [exp(e), exp(a + alpha * data.centre[0]), 0.0 if data.size_only else exp(b + beta * data.centre[1]), alpha,
            beta]


def _law(x: np.ndarray, data: _Data, noise: float = 0.0, samples: list[list[float]] | None = None) -> Law:
    e, a, b, alpha, beta = _constants(x, data)
    return Law(e, a, b, alpha, beta, noise=noise, samples=samples or [])


def _variances(x: np.ndarray, data: _Data) -> tuple[Variance, Variance]:
    """Return the variances of log L: of the sizes around the law, and of the points around their size.

    The constants cost the degrees of freedom: e, a and alpha those of the sizes, b and beta those of the points. If no
    size has two points, all of them cost those of the sizes.
    """
    residuals = data.loss - _log_loss(x, data)
    means = np.bincount(data.size, residuals) / np.bincount(data.size)
    within = float(((residuals - means[data.size]) ** 2).sum())
    count, sizes = len(residuals), data.sizes
    of_tokens = data.constants - 3
    of_sizes = sizes - (data.constants if sizes == count else 3)
    return (Variance(float((means**2).sum()), max(1, of_sizes)),
            Variance(within, max(1, count - sizes - of_tokens)))


def _error_of_largest(minimize: Callable[..., Any], points: Sequence[Point], size_only: bool) -> float:
    """Return the root mean square of the errors of log L for the largest sizes, predicted from the others.

    0 if the others do not determine a law.
    """
    sizes = sorted({point.parameters for point in points if not point.held_out})
    smallest = sizes[-max(1, int(len(sizes) * HIDDEN_SIZES))]
    hidden = [point for point in points if not point.held_out and point.parameters >= smallest]
    try:
        data = _read([point for point in points if point.parameters < smallest], size_only)
    except ValueError:
        return 0.0
    law = _law(_fit(minimize, data, data.loss, _starts(data)), data)
    errors = [log(point.loss / law.loss(point.parameters, point.tokens)) for point in hidden]
    return sqrt(sum(error**2 for error in errors) / len(errors))


def fit_stable_law(decayed: Law, points: Sequence[Point]) -> Law:
    """Fit b and beta to losses of the stable phase; e, a and alpha are those of the decayed runs.

    With five constants of its own, the law of the stable phase extrapolates to other sizes than that of the decayed
    runs: fitted to 0.2 to 0.6 M parameters (README.md, corpus gcide), the decay lowered the loss of 10 M parameters by
    0.29, and that of the fitted models by 0.19. With shared constants the residuals were not larger.

    Raises ValueError if the points have fewer than two numbers of tokens; ConfigError without scipy.
    """
    if len({point.tokens for point in points}) < 2:
        raise ValueError("the stable phase has fewer than two validation losses; evaluate it more often")
    sizes, tokens, losses = (np.log([getattr(point, name) for point in points])
                             for name in ("parameters", "tokens", "loss"))
    constants = [decayed.e, decayed.a, decayed.b, decayed.alpha, decayed.beta]
    fitted, residuals = _fit_tokens(constants, sizes, tokens, losses)
    noise = max(decayed.noise, float(np.sqrt((residuals**2).sum() / max(1, len(points) - 2))))
    samples = [_fit_tokens(sample, sizes, tokens, losses)[0] for sample in decayed.samples]
    e, a, b, alpha, beta = fitted
    return replace(decayed, e=e, a=a, b=b, alpha=alpha, beta=beta, noise=noise, samples=samples)


def _fit_tokens(constants: Sequence[float], sizes: np.ndarray, tokens: np.ndarray,
                losses: np.ndarray) -> tuple[list[float], np.ndarray]:
    """Return [e, a, b, alpha, beta] with other b and beta, and the residuals. The arrays are logarithms."""
    least_squares = scipy_function("least_squares")
    e, a, _, alpha, beta = constants
    center = float(tokens.mean())
    of_size = e + a * np.exp(-alpha * sizes)

    def residuals(x: Any) -> np.ndarray:
        result: np.ndarray = np.log(of_size + np.exp(x[0] - x[1] * (tokens - center))) - losses
        return result

    start = log(max(1e-3, float((np.exp(losses) - of_size).mean())))
    found = least_squares(residuals, [start, min(beta, LARGEST_EXPONENT)],
                          bounds=([-_LARGEST_TERM, 0.0], [_LARGEST_TERM, LARGEST_EXPONENT]))
    term, exponent = map(float, found.x)
    return [e, a, exp(term + exponent * center), alpha, exponent], found.fun
