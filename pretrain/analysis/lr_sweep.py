"""Train a run's engine with a rate that grows from step to step: the measurement of the learning-rate range test."""

import math
from collections.abc import Callable

from deepspeed import DeepSpeedEngine

from pretrain.analysis.lr_range import Point, Smoother, has_diverged, rate_at
from pretrain.config.validate import Plan
from pretrain.data.loader import MicroBatch
from pretrain.engine.optimizer import set_learning_rate
from pretrain.engine.steps import open_loader, train_batch
from pretrain.engine.update_guard import FP16_OVERFLOW, guard_updates, skipped_update

_MOST_OVERFLOWS = 30  # of fp16's loss scale at one rate, which is halved after each


def sweep(engine: DeepSpeedEngine, plan: Plan, *, low: float, high: float, steps: int,
          report: Callable[[str], None]) -> list[Point]:
    """Train at most `steps` steps on the run's batches, and stop when the loss has diverged. Collective."""
    guard_updates(engine)
    loader, consumed_samples = open_loader(engine, plan, "train"), plan.args.first_sample
    points, smoother = list[Point](), Smoother()
    try:
        for step in range(steps):
            lr = rate_at(step, low=low, high=high, steps=steps)
            loss = _step(engine, loader.step(consumed_samples), lr)
            consumed_samples += plan.length.batch_sizes.at(consumed_samples)
            points.append(Point(lr, loss, smoother.add(loss)))
            report(f"step {step + 1} of {steps}: rate {lr:.1e}, loss {loss:.3f}")
            if has_diverged(points):
                break
    finally:
        loader.close()
    return points


def _step(engine: DeepSpeedEngine, micro_batches: list[MicroBatch], lr: float) -> float:
    """Run one step. Returns its loss, or NaN if loss or gradient are not finite."""
    for _ in range(_MOST_OVERFLOWS):
        set_learning_rate(engine, lr)
        loss = float(train_batch(engine, micro_batches))
        skipped = skipped_update(engine)
        if skipped is None:
            return loss
        if skipped.reason != FP16_OVERFLOW or skipped.is_bad:
            break
    return math.nan
