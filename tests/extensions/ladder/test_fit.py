"""The fit of the law: published constants, few and degenerate points, held-out points, the compute-optimal size."""

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")

from pretrain.errors import ConfigError
from pretrain.extensions.ladder.fit import compute_optimal, fit_law
from pretrain.extensions.ladder.ladder_file import Law, Point
from pretrain.extensions.ladder.points import read_points

# Besiroglu et al. 2024 (arXiv 2404.10102), with the standard errors of their notebook
PUBLISHED = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
STANDARD_ERRORS = {"e": 0.0257, "a": 124.52, "b": 1293.28, "alpha": 0.0154, "beta": 0.0206}
NAMES = list(STANDARD_ERRORS)
SMALL = Law(1.3, 120.0, 900.0, 0.38, 0.36)  # a law of models of 0.2 to 4 M parameters


def iso_flop_points(noise: float, seed: int = 0) -> list[Point]:
    """Draw losses from the published law for nine budgets of computation, as in Hoffmann et al., approach 2."""
    random = np.random.default_rng(seed)
    points = []
    for flops in np.geomspace(6e18, 3e21, 9):
        for ratio in np.geomspace(0.2, 5, 12):
            parameters = ratio * compute_optimal(PUBLISHED, flops)[0]
            tokens = flops / 6 / parameters
            error = noise * random.standard_t(3) / 3**0.5  # heavy tails, as the residuals of the published points
            loss = PUBLISHED.loss(parameters, tokens) * np.exp(error)
            points.append(Point(f"p{len(points)}", parameters, tokens, loss))
    return points


def ladder_points(sizes: int, counts: int, of_size: float, of_point: float, seed: int = 0) -> list[Point]:
    """Return a few small runs; the points of a run have a residual in common."""
    random = np.random.default_rng(seed)
    points = []
    for number, parameters in enumerate(np.geomspace(2e5, 4e6, sizes)):
        error = of_size * random.standard_normal()
        for tokens in np.geomspace(2e6, 2e7, counts):
            loss = SMALL.loss(parameters, tokens) * np.exp(error + of_point * random.standard_normal())
            points.append(Point(f"run{number}", float(parameters), float(tokens), float(loss)))
    return points


def test_exact_losses():
    """Without noise, the constants are those that the losses were made with."""
    law = fit_law(iso_flop_points(0.0), resamples=0)
    for name in NAMES:
        assert getattr(law, name) == pytest.approx(getattr(PUBLISHED, name), rel=0.01)
    assert law.noise < 1e-4


def test_constants_of_noisy_losses():
    """With the noise of the published points, the constants are found within two published standard errors."""
    law = fit_law(iso_flop_points(0.0075), resamples=30)
    samples = np.array(law.samples)
    for index, name in enumerate(NAMES):
        true = getattr(PUBLISHED, name)
        assert abs(getattr(law, name) - true) < 2 * STANDARD_ERRORS[name]
        assert samples[:, index].min() < true < samples[:, index].max()
    found = law.predict(7e10, 1.4e12)
    assert found.low < PUBLISHED.loss(7e10, 1.4e12) < found.high
    assert 0.003 < law.noise < 0.02


@pytest.mark.skipif("CHINCHILLA_POINTS" not in os.environ, reason="README.md describes how to get the points")
def test_published_points():
    """The points of Hoffmann et al., figure 4, give the estimates of Besiroglu et al., who leave out the 5 highest."""
    points = read_points(Path(os.environ["CHINCHILLA_POINTS"]))
    assert len(points) == 240
    law = fit_law(points)
    for name in NAMES:
        assert abs(getattr(law, name) - getattr(PUBLISHED, name)) < STANDARD_ERRORS[name] / 2


def test_few_points_of_small_models():
    """Five runs of 0.2 to 4 M parameters: the interval is not narrower than the noise, and not absurd."""
    points = ladder_points(5, 3, 0.004, 0.002)
    law = fit_law(points, resamples=20)
    found = law.predict(1.6e7, 8e7)
    width = found.high / found.low - 1
    assert 0.01 < width < 0.3
    assert found.low < SMALL.loss(1.6e7, 8e7) < found.high
    assert fit_law(points, resamples=3, seed=4) == fit_law(points, resamples=3, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "least"), [(5, 17), (4, 11)])
def test_simulated_ladders(sizes, least):
    """Of 20 simulated ladders with five sizes, nearly all predict a larger run in their interval; with four, fewer."""
    inside = 0
    for seed in range(20):
        found = fit_law(ladder_points(sizes, 3, 0.004, 0.002, seed), resamples=24, seed=seed).predict(1.6e7, 8e7)
        error = np.hypot(0.004, 0.002) * np.random.default_rng(1000 + seed).standard_normal()
        inside += found.low <= SMALL.loss(1.6e7, 8e7) * np.exp(error) <= found.high
    print(f"{sizes} sizes: {inside} of 20")
    assert inside >= least


def test_held_out_points_have_no_effect():
    points = ladder_points(5, 3, 0.002, 0.001)
    hidden = dataclasses.replace(points[-1], parameters=1e8, loss=9.0, held_out=True)
    assert fit_law([*points, hidden], resamples=2) == fit_law(points, resamples=2)


def test_one_term():
    """The law of points with one number of tokens has no term of D."""
    points = [Point(f"{n:g}", n, 1e11, 1.2 + 30 / n**0.18) for n in (2e7, 1e8, 3e8, 1e9, 3e9)]
    law = fit_law(points, resamples=5, size_only=True)
    assert (law.e, law.alpha) == pytest.approx((1.2, 0.18), rel=0.01)
    assert (law.b, law.beta) == (0, 0)
    assert law.loss(1e10, 1e11) == pytest.approx(1.2 + 30 / 1e10**0.18, rel=1e-4)


def proportional(points: list[Point]) -> list[Point]:
    return [dataclasses.replace(point, tokens=20 * point.parameters) for point in points]


@pytest.mark.parametrize(("change", "problem"), [
    (lambda points: points[:6], "2 different numbers of parameters; the law needs at least 3"),
    (lambda points: [dataclasses.replace(point, tokens=1e7) for point in points], "1 different numbers of tokens"),
    (lambda points: points[::4], "there are 4 points to fit; the 5 constants of the law need at least 6"),
    (lambda points: [dataclasses.replace(point, held_out=True) for point in points], "0 different numbers"),
    (proportional, "function of their parameters.*other numbers of tokens for the same models"),
    (lambda points: [dataclasses.replace(points[0], loss=float("nan")), *points[1:]], "run0 .* not above 0"),
])
def test_points_that_determine_no_law(change, problem):
    with pytest.raises(ValueError, match=problem):
        fit_law(change(ladder_points(5, 3, 0.002, 0.001)))


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"scipy: .*not installed\. pip install 'ds-pretrain\[ladder\]'"):
        fit_law(ladder_points(5, 3, 0.002, 0.001))


def test_compute_optimal():
    """No other size at the same computation has a lower loss; the published law trains about 20 tokens a parameter."""
    parameters, tokens = compute_optimal(PUBLISHED, 5.76e23)
    assert 6 * parameters * tokens == pytest.approx(5.76e23)
    lowest = PUBLISHED.loss(parameters, tokens)
    assert all(PUBLISHED.loss(parameters * f, tokens / f) > lowest for f in (0.5, 0.95, 1.05, 2))
    assert 15 < tokens / parameters < 25
    with pytest.raises(ValueError, match="no compute-optimal size"):
        compute_optimal(Law(1.0, 30.0, 0.0, 0.2, 0.0), 1e20)
    with pytest.raises(ValueError, match="above 0"):
        compute_optimal(PUBLISHED, 0)
