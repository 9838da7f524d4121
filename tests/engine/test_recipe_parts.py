"""Early stopping, the limit of adaptive clipping and the estimator of the noise scale, without an engine."""

import math

import numpy as np
import pytest
import torch

from pretrain.engine.clipping import limit_of
from pretrain.engine.update_statistics import estimate
from pretrain.resilience.early_stopping import EarlyStopping


def evaluations_until_the_end(losses: list[float], *, patience: int, min_delta: float = 0.0) -> int | None:
    """Return after how many evaluations the run is over; each one resumes from the state that the last one left."""
    state = None
    for count, loss in enumerate(losses, 1):
        stopping = EarlyStopping(patience=patience, min_delta=min_delta)
        stopping.set_state(state)
        assert not stopping.is_over
        stopping.observe(count, loss)
        if stopping.is_over:
            return count
        state = stopping.state()
    return None


@pytest.mark.parametrize(("losses", "patience", "min_delta", "end"), [
    ([3, 2, 1, 1, 1], 2, 0.0, 5),  # an equal loss is not lower
    ([3, 2, 4, 1, 5, 5], 2, 0.0, 6),
    ([3, 2.9, 2.8, 2.7], 3, 0.25, None),  # 2.7 is lower than 3 by 0.3
    ([3, 2.9, 2.8, 2.9], 3, 0.25, 4),
    ([3, 2.5, 2.0], 1, 0.5, None),  # exactly the smallest decrease
    ([math.nan, math.nan, 1.0, math.inf, math.nan], 2, 0.0, 2),
    ([math.nan, 1.0, math.inf, math.nan], 2, 0.0, 4),
    ([5, 5, 5], 0, 0.0, None)])
def test_the_run_ends_after_evaluations_without_a_lower_loss(losses, patience, min_delta, end):
    assert evaluations_until_the_end(losses, patience=patience, min_delta=min_delta) == end


def test_the_reason_names_the_lowest_loss():
    stopping = EarlyStopping(patience=1, min_delta=0.1)
    stopping.observe(100, 2.0)
    stopping.observe(200, 1.95)
    assert stopping.reason() == ("the validation loss has not decreased by at least 0.1 in 1 evaluations; "
                                 "the lowest was 2.0000 at step 100")
    assert EarlyStopping(patience=0, min_delta=0.0).state() is None


@pytest.mark.parametrize("percentile", [0.5, 10, 50, 90, 100])
def test_the_limit_is_numpy_s_percentile_of_the_window(percentile):
    norms = list(np.random.default_rng(0).lognormal(size=30))
    wanted = np.percentile(norms, percentile)
    settings = {"percentile": percentile, "window": 30}
    assert limit_of(norms, **settings, largest=0) == pytest.approx(wanted, rel=1e-12)
    assert limit_of(norms, **settings, largest=wanted / 2) == wanted / 2, "looser than the JSON's limit"
    assert limit_of(norms[1:], **settings, largest=1.5) == 1.5
    assert limit_of(norms[1:], **settings, largest=0) == 0
    assert limit_of([0.0] * 30, **settings, largest=1.5) == 1.5


def test_the_noise_scale_s_estimates_are_unbiased():
    """Gradients of samples have the mean G and a known covariance; the estimates are averaged over 20,000 steps."""
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([0.3, -0.2, 0.1, 0.0]).double(), torch.tensor([1.0, 0.5, 2.0, 0.1]).double()
    small_batch, micro_batches, steps = 2, 3, 20_000
    samples = mean + std * torch.randn(steps, micro_batches, small_batch, 4, generator=generator, dtype=torch.float64)
    micro = samples.mean(2)
    small, big = micro.square().sum(-1).mean(1), micro.mean(1).square().sum(-1)
    found = estimate(small, big, small_batch, small_batch * micro_batches)
    wanted = torch.stack([std.square().sum(), mean.square().sum()])
    error = found.std(1) / math.sqrt(steps)
    assert ((found.mean(1) - wanted).abs() < 4 * error).all()
    assert (error / wanted < 0.1).all(), "the test is not sharp"
