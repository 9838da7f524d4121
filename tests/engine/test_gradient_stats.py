"""GradientStats with an engine that has only norms: the statistics of a few steps, without a device to wait for."""

import math
from types import SimpleNamespace

import torch

from pretrain.engine.measure.gradient_stats import GradientStats


def fake_engine(limit: float) -> SimpleNamespace:
    engine = SimpleNamespace(device=torch.device("cpu"), norm=None, optimizer=SimpleNamespace(overflow=False),
                             gradient_clipping=lambda: limit)
    engine.get_global_grad_norm = lambda: engine.norm
    return engine


def test_skipped_updates_count_as_steps_but_neither_as_norms_nor_as_clipped():
    engine = fake_engine(1.0)
    stats = GradientStats(engine)
    for norm, skipped in ((torch.tensor(0.5), False), (torch.tensor(2.0), False), (float("inf"), True),
                          (torch.tensor(9.0, dtype=torch.float64), True)):  # the last one: a veto
        engine.norm, engine.optimizer.overflow = norm, skipped
        stats.observe()
    assert stats.take() == {"grad_norm_max": 9.0, "clip_norm": 1.0, "clip_rate": 0.25}
    assert stats.take() == {"grad_norm_max": None, "clip_norm": 1.0, "clip_rate": None}


def test_without_clipping_there_is_neither_a_limit_nor_a_rate():
    engine = fake_engine(0.0)
    stats = GradientStats(engine)
    engine.norm = torch.tensor(3.0)
    stats.observe()
    assert stats.take() == {"grad_norm_max": 3.0, "clip_norm": None, "clip_rate": None}
    engine.norm = torch.tensor(math.nan)  # possible with "check_grad_overflow": false
    stats.observe()
    assert stats.take()["grad_norm_max"] is None
