"""The law of the stable phase of WSD: the law of the decayed runs with another term of the tokens."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np

from pretrain.analysis.scaling.ladder_file import Point
from pretrain.analysis.scaling.law import LARGEST_EXPONENT, Law
from pretrain.analysis.scaling.optimizers import scipy_function

_LARGEST_TERM = 20.0  # of the logarithm of the term of D at the centre of the points, in either direction


def fit_stable_law(decayed: Law, points: Sequence[Point]) -> Law:
    """Fit b and beta to losses of the stable phase; e, a and alpha are those of the decayed runs.

    With five constants of its own, the law of the stable phase extrapolates to other sizes than that of the decayed
    runs: fitted to 0.2 to 0.6 M parameters (tools/ladder_grades, gcide), the decay lowered the loss of 10 M parameters
    by 0.29, and that of the fitted models by 0.19. With shared constants the residuals were not larger.

    Raises ValueError if the points have fewer than two numbers of tokens; ConfigError without scipy.
    """
    if len({point.tokens for point in points}) < 2:
        raise ValueError("the stable phase has fewer than two validation losses; evaluate it more often")
    sizes, tokens, losses = (np.log([getattr(point, name) for point in points])
                             for name in ("parameters", "tokens", "loss"))
    fitted, residuals = _fit([decayed.e, decayed.a, decayed.b, decayed.alpha, decayed.beta], sizes, tokens, losses)
    noise = max(decayed.noise, float(np.sqrt((residuals**2).sum() / max(1, len(points) - 2))))
    samples = [_fit(sample, sizes, tokens, losses)[0] for sample in decayed.samples]
    e, a, b, alpha, beta = fitted
    return replace(decayed, e=e, a=a, b=b, alpha=alpha, beta=beta, noise=noise, samples=samples)


def _fit(constants: Sequence[float], sizes: np.ndarray, tokens: np.ndarray,
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
