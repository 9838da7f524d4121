"""Engines of a run for tools that train for a moment: they touch neither the run folder nor a running job.

`sweep` trains with a rate that grows from step to step: the measurement of the learning-rate range test.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.load.agree_on_checkpoint import agree_on_data, verify_weights
from pretrain.checkpoint.load.init_from import find_initial_weights
from pretrain.checkpoint.load.load_checkpoint import load_weights
from pretrain.checkpoint.load.start import Start
from pretrain.config.equal_facts import run_facts
from pretrain.config.plan import Plan
from pretrain.distributed.process_group import init_process_group, leave_process_group
from pretrain.distributed.world import World
from pretrain.engine.build import build_engine, deepspeed_output
from pretrain.engine.examine import train_without_overflow
from pretrain.engine.steps import open_loader
from pretrain.engine.update_guard import guard_updates
from pretrain.extensions.sanity.checked_engine import remove_trial_files, trial_plan
from pretrain.extensions.sanity.lr_range import Point, Smoother, has_diverged, rate_at


@contextmanager
def trial_run(start: Start, world: World, program: str) -> Iterator[tuple[Plan, Callable[[Plan], DeepSpeedEngine]]]:
    """Connect the ranks; disconnect them after the block. Collective; raises ConfigError on every rank.

    Yields the plan, and a function that returns an engine with the weights that the run begins with at step 0.

    The weights come from --init_from, or are new ones. Checkpoints of the run folder are not used.
    """
    args, weights = start.plan.args, start.weights
    plan = trial_plan(start.plan)
    if weights is None and args.init_from is not None:  # the run folder has a checkpoint, but the source still exists
        weights = find_initial_weights(args.init_from)
        plan = replace(plan, origin=weights.origin)
    if start.resume is not None and world.rank == 0:
        print(f"note: {args.save} has checkpoints; this begins with the weights of step 0", file=sys.stderr)
    with deepspeed_output(args.deepspeed_log_level):
        init_process_group(world, facts=run_facts(plan, program, world))
        agree_on_data(plan)
        if weights is not None:
            verify_weights(weights)

    def build(plan: Plan) -> DeepSpeedEngine:
        engine = build_engine(plan, initialize=weights is None)
        if weights is not None:
            load_weights(engine, weights.files)
        return engine

    yield plan, build
    dist.barrier()
    remove_trial_files(start.plan)
    leave_process_group()


def sweep(engine: DeepSpeedEngine, plan: Plan, *, low: float, high: float, steps: int,
          report: Callable[[str], None]) -> list[Point]:
    """Train at most `steps` steps on the run's batches, and stop when the loss has diverged. Collective."""
    guard_updates(engine)
    loader, consumed_samples = open_loader(engine, plan, "train"), plan.args.first_sample
    points, smoother = list[Point](), Smoother()
    try:
        for step in range(steps):
            lr = rate_at(step, low=low, high=high, steps=steps)
            loss, skipped = train_without_overflow(engine, loader.step(consumed_samples), lr)
            loss = loss if skipped is None else math.nan
            consumed_samples += plan.length.batch_sizes.at(consumed_samples)
            points.append(Point(lr, loss, smoother.add(loss)))
            report(f"step {step + 1} of {steps}: rate {lr:.1e}, loss {loss:.3f}")
            if has_diverged(points):
                break
    finally:
        loader.close()
    return points
