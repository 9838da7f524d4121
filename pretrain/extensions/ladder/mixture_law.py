"""Data mixing laws: the loss of each validation set by the parts of a blend (Ye et al. 2024, arXiv 2403.16952).

L_i(r) = c_i + k_i exp(sum_j t_ij r_j), where r_j is the part of domain j in the samples. The parts add up to 1, so k_i
is not a constant of its own: here log(k_i) is in each t_ij, and a set has one constant more than there are domains.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, log, sqrt
from typing import Any

import numpy as np

from pretrain.extensions.ladder.expected_curve import LEVEL
from pretrain.extensions.ladder.fit import scipy_function
from pretrain.extensions.ladder.ladder_file import Variance, interval
from pretrain.monitor.curve import Expected

LEAST_PART = 0.05  # share of a domain in a small run: one that never reads a domain has a loss of another kind
_PARTS_OF_C = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99)  # parts of the lowest loss: the starts of the fit
_LARGEST_PART = 0.999
_CANDIDATES = 2000
_SAME = 0.01  # distance of two blends that count as one


@dataclass(frozen=True)
class MixtureLaw:
    """The law of one validation set, with its uncertainty."""

    c: float  # nats a token
    t: list[float]  # one of each domain
    noise: float = 0.0  # standard deviation of the logarithm of the loss around the law
    samples: list[list[float]] = field(default_factory=list)  # [c, *t], fitted to drawn losses

    def __post_init__(self) -> None:
        for numbers in ([self.c, *self.t], *self.samples):
            if len(numbers) != len(self.t) + 1 or not all(map(isfinite, numbers)) or numbers[0] < 0:
                raise ValueError("a mixing law has other numbers than c (at least 0) and one t of each domain")
        if not (isfinite(self.noise) and self.noise >= 0):
            raise ValueError("the noise of a mixing law is not a finite number of at least 0")

    def loss(self, parts: Sequence[float]) -> float:
        """Return the loss in nats a token."""
        return _loss([self.c, *self.t], parts)

    def sampled(self, parts: Sequence[float]) -> list[float]:
        """Return the loss of each sample of the law."""
        return [_loss(each, parts) for each in self.samples] or [self.loss(parts)]

    def predict(self, parts: Sequence[float]) -> Expected:
        """Return the loss with its interval: uncertainty of the law, and noise of a run around it."""
        return interval(self.loss(parts), [log(loss) for loss in self.sampled(parts)], self.noise)


@dataclass(frozen=True)
class MixtureRun:
    """A small run of a blend."""

    name: str
    parts: list[float]  # parts of the domains; their sum is 1
    losses: dict[str, float]  # losses of the validation sets, in nats a token


@dataclass(frozen=True)
class Proposal:
    """The parts with the lowest predicted mean of the validation losses."""

    parts: list[float]
    low: list[float]  # lower end of the samples' interval, by part
    high: list[float]
    losses: dict[str, Expected]
    mean: Expected


def choose_parts(domains: int, count: int, *, taken: Sequence[Sequence[float]] = (),
                 seed: int = 0) -> list[list[float]]:
    """Return blends that are far from one another and from `taken`, with at least LEAST_PART of every domain.

    The first ones are nearly pure domains, if these are not in `taken`; each further one is the drawn blend that is
    furthest from the others.
    """
    pure = [[1 - LEAST_PART * (domains - 1) if j == i else LEAST_PART for j in range(domains)] for i in range(domains)]
    drawn = np.random.default_rng(seed).dirichlet(np.ones(domains), _CANDIDATES)
    candidates = LEAST_PART + (1 - LEAST_PART * domains) * drawn
    chosen = [each for each in pure if all(np.linalg.norm(np.subtract(each, other)) > _SAME for other in taken)][:count]
    while len(chosen) < count:
        distances = np.linalg.norm(candidates[:, None] - np.array([*taken, *chosen]), axis=2).min(axis=1)
        found = np.round(candidates[int(distances.argmax())], 3)
        chosen.append([*map(float, found[:-1]), round(1 - float(found[:-1].sum()), 3)])
    return chosen


def fewest_runs(domains: int) -> int:
    """Return how many runs the law needs at least: one more than a set has constants."""
    return domains + 2


def fit_mixtures(runs: Sequence[MixtureRun], *, seed: int = 0, resamples: int = 100) -> dict[str, MixtureLaw]:
    """Fit the law of each validation set to the losses of the runs; `resamples` further fits give the intervals.

    Each resample adds drawn normal residuals to the fitted losses. Raises ValueError, which says what is missing, if
    the runs do not determine the constants; ConfigError without scipy.
    """
    parts = np.array([run.parts for run in runs], dtype=float)
    domains = parts.shape[1]
    if len(runs) < fewest_runs(domains):
        raise ValueError(f"there are {len(runs)} runs; {domains} domains need at least {fewest_runs(domains)} blends")
    if domains < 2 or np.linalg.matrix_rank(parts, tol=1e-3) < domains or len({tuple(run.parts) for run in runs}) < 3:
        raise ValueError("the blends of the runs are not different enough: the effects of the domains cannot be "
                         "separated")
    least_squares = scipy_function("least_squares")
    random = np.random.default_rng(seed)
    laws = {}
    for name in runs[0].losses:
        losses = np.array([run.losses[name] for run in runs])
        if not (np.isfinite(losses).all() and (losses > 0).all()):
            raise ValueError(f"a run has a loss of {name} that is not a finite number above 0")
        best = _fit(least_squares, parts, losses, [_start(parts, losses, part * losses.min()) for part in _PARTS_OF_C])
        fitted = np.array([_loss(best, each) for each in parts])
        variance = Variance(float((np.log(losses / fitted) ** 2).sum()), len(runs) - domains - 1)
        drawn = (fitted * np.exp(random.standard_normal(len(runs)) * variance.draw(random)) for _ in range(resamples))
        samples = [_fit(least_squares, parts, each, [best, _start(parts, each, best[0])]) for each in drawn]
        laws[name] = MixtureLaw(best[0], best[1:], sqrt(variance.value), samples)
    return laws


def propose(laws: Mapping[str, MixtureLaw], tried: Sequence[Sequence[float]],
            importance: Mapping[str, float] | None = None) -> Proposal:
    """Return the blend with the lowest predicted mean of the validation losses, within the range of the tried parts.

    The mean is convex in the parts, so that its only minimum is found. `importance`: weight of each set in the mean.
    """
    minimize = scipy_function("minimize")
    weights = np.array([(importance or {}).get(name, 1.0) for name in laws])
    weights = weights / weights.sum()
    bounds = list(zip(np.min(tried, axis=0), np.max(tried, axis=0), strict=True))
    start = np.mean(tried, axis=0)

    def lowest(constants: np.ndarray) -> np.ndarray:
        """Return the parts for [c, *t] of each set."""
        c, t = constants[:, 0], constants[:, 1:]

        def mean(r: np.ndarray) -> tuple[float, np.ndarray]:
            terms = weights * np.exp(t @ r)
            return float(weights @ c + terms.sum()), terms @ t

        found = minimize(mean, start, jac=True, method="SLSQP", bounds=bounds, options={"ftol": 1e-12},
                         constraints={"type": "eq", "fun": lambda r: r.sum() - 1, "jac": np.ones_like})
        result: np.ndarray = found.x
        return result

    parts = list(map(float, np.round(lowest(np.array([[law.c, *law.t] for law in laws.values()])), 4)))
    sampled = [lowest(np.array(each)) for each in zip(*(law.samples for law in laws.values()), strict=True)] \
        or [np.array(parts)]
    low, high = np.quantile(sampled, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=0)
    losses = {name: law.predict(parts) for name, law in laws.items()}
    means = np.array([law.sampled(parts) for law in laws.values()]).T @ weights
    mean = float(weights @ [each.loss for each in losses.values()])
    noise = float(weights @ [law.noise for law in laws.values()])
    return Proposal(parts, list(map(float, low)), list(map(float, high)), losses,
                    interval(mean, list(map(log, means)), noise))


def _loss(constants: Sequence[float], parts: Sequence[float]) -> float:
    c, *t = constants
    return c + exp(sum(each * part for each, part in zip(t, parts, strict=True)))


def _start(parts: np.ndarray, losses: np.ndarray, c: float) -> list[float]:
    """Return [c, *t] with the t of the smallest squares of log(L - c)."""
    t, *_ = np.linalg.lstsq(parts, np.log(losses - min(c, _LARGEST_PART * losses.min())), rcond=None)
    return [c, *map(float, t)]


def _fit(least_squares: Callable[..., Any], parts: np.ndarray, losses: np.ndarray,
         starts: Sequence[list[float]]) -> list[float]:
    """Return [c, *t] with the smallest squares of the residuals of log L."""
    logs = np.log(losses)
    largest = _LARGEST_PART * float(losses.min())

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.log(x[0] + np.exp(parts @ x[1:])) - logs

    def jacobian(x: np.ndarray) -> np.ndarray:
        terms = np.exp(parts @ x[1:])[:, None]
        return np.hstack([np.ones_like(terms), terms * parts]) / (x[0] + terms)

    count = parts.shape[1]
    bounds = ([0.0] + [-30.0] * count, [largest] + [30.0] * count)
    found = [least_squares(residuals, np.clip(start, *bounds), jac=jacobian, bounds=bounds, x_scale="jac",
                           xtol=1e-10, ftol=1e-10, gtol=1e-10, max_nfev=300) for start in starts]
    return [float(each) for each in min(found, key=lambda result: float(result.cost)).x]
