"""Data mixing laws: known laws are found, the proposed weights have the lowest loss, and too few runs are rejected."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("scipy")

from pretrain.extensions.ladder.mixture_law import (
    LEAST_PART,
    MixtureLaw,
    MixtureRun,
    choose_parts,
    fewest_runs,
    fit_mixtures,
    propose,
)

TRUE = {"web": MixtureLaw(1.5, [0.1, 1.2, 0.9]), "code": MixtureLaw(1.2, [1.0, -0.2, 0.8]),
        "books": MixtureLaw(2.0, [0.9, 0.8, -0.3])}


def runs_of(laws: dict[str, MixtureLaw], blends: list[list[float]], noise: float) -> list[MixtureRun]:
    random = np.random.default_rng(1)
    return [MixtureRun(f"run{number}", parts, {
        name: law.loss(parts) * float(np.exp(noise * random.standard_normal())) for name, law in laws.items()})
        for number, parts in enumerate(blends)]


def test_known_laws_are_found():
    """Eight noisy runs of three domains predict the losses of a ninth blend."""
    blends = choose_parts(3, 8)
    laws = fit_mixtures(runs_of(TRUE, blends, 0.003), resamples=30)
    other = [0.2, 0.5, 0.3]
    for name, law in laws.items():
        found = law.predict(other)
        assert found.low < TRUE[name].loss(other) < found.high
        assert found.high / found.low < 1.05
        assert 0.0005 < law.noise < 0.01
    exact = fit_mixtures(runs_of(TRUE, blends, 0.0), resamples=0)
    for name, law in exact.items():
        assert [law.c, *law.t] == pytest.approx([TRUE[name].c, *TRUE[name].t], rel=1e-3)


def test_proposed_weights():
    """The proposal has the lowest mean on a grid, follows the importance, and stays in the range of the runs."""
    blends = choose_parts(3, 8)
    grid = [[a, b, 1 - a - b] for a in np.linspace(0.05, 0.9, 35) for b in np.linspace(0.05, 0.9, 35) if a + b <= 0.95]
    found = propose(TRUE, blends)
    lowest = min(np.mean([law.loss(parts) for law in TRUE.values()]) for parts in grid)
    assert found.mean.loss <= lowest + 1e-4
    assert sum(found.parts) == pytest.approx(1, abs=2e-4)
    code = propose(TRUE, blends, {"web": 0.0, "code": 1.0, "books": 0.0})
    assert code.parts == pytest.approx([0.05, 0.9, 0.05], abs=1e-3)
    sampled = fit_mixtures(runs_of(TRUE, blends, 0.003), resamples=20)
    found = propose(sampled, blends)
    assert all(low <= high for low, high in zip(found.low, found.high, strict=True))
    assert found.mean.low < lowest < found.mean.high


@pytest.mark.parametrize("domains", [2, 3, 5])
def test_blends_of_the_runs(domains):
    """The blends add up to 1, have a part of each domain, and are not near one another or a taken one."""
    taken = [1 / domains] * domains
    blends = choose_parts(domains, 2 * domains + 1, taken=[taken])
    for number, parts in enumerate(blends):
        assert sum(parts) == pytest.approx(1)
        assert min(parts) >= LEAST_PART - 1e-3
        assert all(np.linalg.norm(np.subtract(parts, other)) > 0.08 for other in [taken, *blends[:number]])
    assert blends == choose_parts(domains, 2 * domains + 1, taken=[taken])


def test_runs_that_determine_no_law():
    runs = runs_of(TRUE, choose_parts(3, 8), 0.003)
    with pytest.raises(ValueError, match="there are 4 runs; 3 domains need at least 5 blends"):
        fit_mixtures(runs[:fewest_runs(3) - 1])
    same = [dataclasses.replace(run, parts=[0.2, 0.3, 0.5]) for run in runs]
    with pytest.raises(ValueError, match="not different enough"):
        fit_mixtures(same)
    broken = [dataclasses.replace(runs[0], losses={**runs[0].losses, "web": float("nan")}), *runs[1:]]
    with pytest.raises(ValueError, match="a loss of web that is not a finite number"):
        fit_mixtures(broken)
    with pytest.raises(ValueError, match="one t of each domain"):
        MixtureLaw(1.0, [0.1, 0.2], samples=[[1.0, 0.1]])


def test_the_blend_that_is_predicted_is_not_one_of_the_runs() -> None:
    blends = choose_parts(2, 5, taken=[[0.95, 0.05]])
    assert len(blends) == 5
    assert all(abs(first - 0.95) > 0.05 for first, _ in blends)
