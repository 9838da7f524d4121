"""Fit the law of the loss to points, with scipy (Hoffmann et al. 2022, arXiv 2203.15556, approach 3).

The constants minimize the sum of the Huber losses of log L. A sum, and small tolerances: with a mean of losses this
small, L-BFGS stopped early (Besiroglu et al. 2024, arXiv 2404.10102, section 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, isfinite, log, sqrt
from typing import Any

import numpy as np

from pretrain.analysis.scaling.ladder_file import Point
from pretrain.analysis.scaling.law import LARGEST_EXPONENT, Law
from pretrain.errors import ConfigError

HUBER_DELTA = 1e-3  # of log L
FEWEST_POINTS, FEWEST_VALUES = 6, 3  # one point more than constants; values of N, and of D
SMALLEST_SPREAD = 0.05  # of log(D), or of log(N), around a line in the other one
_STARTS = 6  # of the grid, the ones with the lowest objective
_GRID = {"e": (0.1, 0.3, 0.5, 0.7, 0.9), "a": (0.2, 0.5, 0.8), "exponent": (0.1, 0.2, 0.35, 0.5, 0.8, 1.2)}
_SMALLEST_TERM = -12.0  # logarithm of a term at the centre of the points: 6e-6 nats


@dataclass(frozen=True)
class _Data:
    """Logarithms of the points, and the run that each belongs to."""

    n: np.ndarray  # log(N) without its mean
    d: np.ndarray  # log(D) without its mean
    loss: np.ndarray  # log(L)
    run: np.ndarray  # index
    centre: tuple[float, float]  # means of log(N) and log(D)

    @property
    def runs(self) -> int:
        return int(self.run.max()) + 1


def fit_law(points: Sequence[Point], *, seed: int = 0, resamples: int = 100) -> Law:
    """Fit the law to the points that are not held out; `resamples` further fits give the intervals.

    Each resample adds the residuals of the fit, with random signs and sizes, to the fitted losses (wild bootstrap).
    The points of a run get the same factor, since their residuals are correlated. The points themselves stay: a few
    runs, drawn with replacement, would often have too few sizes for a fit.

    Raises ValueError, which says what is missing, if the points do not determine the constants; ConfigError without
    scipy.
    """
    minimize = _scipy_minimize()
    data = _read(points)
    best = _fit(minimize, data, data.loss, _starts(data))
    residuals = data.loss - _log_loss(best, data)
    scale = sqrt(len(data.loss) / (len(data.loss) - 5))
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(resamples):
        factors = random.choice(_WEBB, data.runs)[data.run]
        losses = _log_loss(best, data) + factors * residuals * scale
        samples.append(_constants(_fit(minimize, data, losses, [best]), data))
    return Law(*_constants(best, data), noise=_noise(residuals, data), samples=samples)


# Factors of variance 1 (Webb 2023): six values, so that few runs still give many resamples.
_WEBB = np.array([-sqrt(1.5), -1.0, -sqrt(0.5), sqrt(0.5), 1.0, sqrt(1.5)])


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


def _scipy_minimize() -> Callable[..., Any]:
    try:
        from scipy.optimize import minimize
    except ImportError:
        raise ConfigError("scipy", problem="the fit of a scaling law needs it, and it is not installed",
                          remedy="pip install 'ds-pretrain[ladder]'") from None
    function: Callable[..., Any] = minimize
    return function


def _read(points: Sequence[Point]) -> _Data:
    """Check the points. Raises ValueError if they cannot determine the five constants."""
    fitted = [point for point in points if not point.held_out]
    for point in fitted:
        if not all(isfinite(each) and each > 0 for each in (point.parameters, point.tokens, point.loss)):
            raise ValueError(f"a point of run {point.run} has parameters, tokens or a loss that are not above 0")
    for name, values in (("numbers of parameters", {point.parameters for point in fitted}),
                         ("numbers of tokens", {point.tokens for point in fitted})):
        if len(values) < FEWEST_VALUES:
            raise ValueError(f"the points have {len(values)} different {name}; the law needs at least {FEWEST_VALUES}")
    if len(fitted) < FEWEST_POINTS:
        raise ValueError(f"there are {len(fitted)} points to fit; the five constants of the law need at least "
                         f"{FEWEST_POINTS}")
    n, d, loss = (np.log([getattr(point, key) for point in fitted]) for key in ("parameters", "tokens", "loss"))
    centre = float(n.mean()), float(d.mean())
    n, d = n - centre[0], d - centre[1]
    for across, along in ((n, d), (d, n)):
        slope = (across @ along) / (along @ along)
        if np.std(across - slope * along) < SMALLEST_SPREAD:
            raise ValueError("the tokens of the points are a function of the parameters (such as 20 tokens a "
                             "parameter): the terms of N and D cannot be told apart; add points with other numbers of "
                             "tokens for the same model")
    names = {point.run: None for point in fitted}
    return _Data(n, d, loss, np.array([list(names).index(point.run) for point in fitted]), centre)


def _starts(data: _Data) -> list[np.ndarray]:
    """Return starts of a grid: parts of the mean loss for e and the terms of N and D, and exponents."""
    mean = exp(float(data.loss.mean()))
    grid = [np.array([log(mean * e), log(mean * (1 - e) * a), log(mean * (1 - e) * (1 - a)), alpha, beta])
            for e, a, alpha, beta in product(_GRID["e"], _GRID["a"], _GRID["exponent"], _GRID["exponent"])]
    return sorted(grid, key=lambda start: _objective(start, data, data.loss)[0])[:_STARTS]


def _fit(minimize: Callable[..., Any], data: _Data, log_losses: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Return [log e, log a', log b', alpha, beta] with the lowest objective; a' and b' are at the centre of the points."""
    largest = float(log_losses.max())
    bounds = [(_SMALLEST_TERM, largest)] * 3 + [(0.0, LARGEST_EXPONENT)] * 2
    found = []
    for start in starts:
        x = start
        for delta in (0.1, HUBER_DELTA):  # first with a smooth objective
            result = minimize(_objective, x, args=(data, log_losses, delta), jac=True, method="L-BFGS-B", bounds=bounds,
                              options={"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9})
            x = result.x
        found.append((float(result.fun), x))
    return min(found, key=lambda each: each[0])[1]


def _objective(x: np.ndarray, data: _Data, log_losses: np.ndarray,
               delta: float = HUBER_DELTA) -> tuple[float, np.ndarray]:
    """Return the sum of the Huber losses of log L, divided by delta^2, and its gradient."""
    terms = np.stack([np.full_like(data.n, x[0]), x[1] - x[3] * data.n, x[2] - x[4] * data.d])
    largest = terms.max(axis=0)
    parts = np.exp(terms - largest)
    total = parts.sum(axis=0)
    residuals = (largest + np.log(total) - log_losses) / delta
    size = np.abs(residuals)
    value = np.where(size <= 1, residuals**2 / 2, size - 0.5).sum()
    slopes = np.clip(residuals, -1, 1) / delta * (parts / total)
    gradient = np.array([*slopes.sum(axis=1), -(slopes[1] @ data.n), -(slopes[2] @ data.d)])
    return float(value), gradient


def _log_loss(x: np.ndarray, data: _Data) -> np.ndarray:
    terms = [np.full_like(data.n, x[0]), x[1] - x[3] * data.n, x[2] - x[4] * data.d]
    result: np.ndarray = np.logaddexp.reduce(terms)
    return result


def _constants(x: np.ndarray, data: _Data) -> list[float]:
    """Return [e, a, b, alpha, beta]."""
    e, a, b, alpha, beta = map(float, x)
    return [exp(e), exp(a + alpha * data.centre[0]), exp(b + beta * data.centre[1]), alpha, beta]


def _noise(residuals: np.ndarray, data: _Data) -> float:
    """Return the standard deviation of log L: of the runs around the law, and of the points around their run.

    The degrees of freedom are shared out: those of e, a and alpha to the runs, which are the models, and those of b
    and beta to the points of a run; all of them to the points if each is a run of its own.
    """
    count, runs = len(residuals), data.runs
    sizes = np.bincount(data.run)
    means = np.bincount(data.run, residuals) / sizes
    within = float(((residuals - means[data.run]) ** 2).sum()) / max(1, count - runs - 2)
    between = float((means**2).sum()) / max(1, runs - (5 if runs == count else 3))
    return sqrt(within + between)
