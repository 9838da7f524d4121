"""The law of the stable phase shares its term of N with the law of the decayed runs."""

import numpy as np
import pytest

from pretrain.extensions.ladder.fit import fit_law, fit_stable_law
from pretrain.extensions.ladder.ladder_file import Law, Point

DECAYED, STABLE = Law(1.7, 12.0, 90.0, 0.25, 0.4), Law(1.7, 12.0, 60.0, 0.25, 0.35)


def points(law: Law, tokens: list[float], noise: float = 0.0) -> list[Point]:
    random = np.random.default_rng(0)
    return [Point(f"{size:g}", size, each, law.loss(size, each) * float(np.exp(noise * random.normal())),
                  decayed=law is DECAYED) for size in (2e5, 4e5, 8e5, 1.6e6, 3.2e6) for each in tokens]


def test_the_term_of_the_tokens_is_found() -> None:
    found = fit_stable_law(DECAYED, points(STABLE, [2e5, 4e5, 6e5]))
    assert (found.e, found.a, found.alpha) == (DECAYED.e, DECAYED.a, DECAYED.alpha)
    assert found.b == pytest.approx(STABLE.b, rel=1e-3)
    assert found.beta == pytest.approx(STABLE.beta, rel=1e-3)
    assert found.noise < 1e-6


def test_both_laws_keep_their_distance_beyond_the_points() -> None:
    decayed = fit_law(points(DECAYED, [2e5, 4e5, 8e5], 0.002), resamples=20)
    found = fit_stable_law(decayed, points(STABLE, [1.6e5, 3.2e5, 4.8e5, 6.4e5], 0.002))
    size, tokens = 1e7, 6.4e5
    assert found.loss(size, tokens) - decayed.loss(size, tokens) == pytest.approx(
        STABLE.loss(size, tokens) - DECAYED.loss(size, tokens), rel=0.1)
    expected = found.predict(size, tokens)
    assert expected.low < STABLE.loss(size, tokens) < expected.high
    assert len(found.samples) == 20


def test_a_single_evaluation_is_too_little() -> None:
    with pytest.raises(ValueError, match="fewer than two validation losses"):
        fit_stable_law(DECAYED, points(STABLE, [2e5]))
