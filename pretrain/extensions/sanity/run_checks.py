"""Run all checks on engines that are built like the run's, and discarded afterwards.

They touch neither the run folder nor a running job. `sweep` trains with a rate that grows from step to step: the
measurement of the learning-rate range test.
"""

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from pretrain.callback import Callback, Trial
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
from pretrain.engine.steps import data_parallel_rank, data_parallel_size, open_loader
from pretrain.engine.update_guard import guard_updates
from pretrain.errors import ConfigError
from pretrain.extensions.sanity import forward_checks, training_checks
from pretrain.extensions.sanity.batches import SmallBatch, small_batch
from pretrain.extensions.sanity.checked_engine import CheckedEngine, plan_of_checks, remove_trial_files, trial_plan
from pretrain.extensions.sanity.extension import Result, as_json, failed_checks, not_made, print_table
from pretrain.extensions.sanity.lr_range import Point, Smoother, has_diverged, rate_at
from pretrain.terminal import clear_status

DEFAULT_STEPS = 1000  # at most, to learn one batch; 30 to 100 are usual
Report = Callable[[str], None]
"""called on every rank with a line about the progress"""


def run_checks(plan: Plan, build: Callable[[Plan], DeepSpeedEngine], *, steps: int = DEFAULT_STEPS,
               report: Report = lambda line: None) -> list[Result]:
    """Run all checks; collective. Returns the same results on all ranks.

    Each training begins with a new engine: `build` returns one with the weights that the run begins with. No engine of
    the checks exists after this function, so that the run itself begins with a state that they have not touched.
    """
    plan = plan_of_checks(plan)
    with deepspeed_output(plan.args.deepspeed_log_level):
        report("building the engine")
        first = CheckedEngine(build(plan), plan)
        results, learned = _check_first(first, steps, report)
        is_exact = first.engine.device.type == "cpu"
        _discard(first)
        return results if learned is None else results + _check_again(plan, build, learned, is_exact, report)


def _check_first(checked: CheckedEngine, steps: int,
                 report: Report) -> tuple[list[Result], training_checks.OneBatch | None]:
    """Run the checks that need one engine, and train it on one batch; None if it could not be trained."""
    consumed_samples = checked.plan.args.first_sample
    report("reading the first batch")
    batches = checked.batches(consumed_samples)
    vocabulary = forward_checks.check_vocabulary(checked.plan, batches)
    results = [vocabulary, forward_checks.check_labels(batches), forward_checks.check_document_ends(checked.plan)]
    if not vocabulary.passed:  # the embedding has no row for these tokens
        return [*results, not_made("all other checks", "a token is not in the model's vocabulary")], None
    report("forward passes")
    results.append(forward_checks.check_initial_loss(checked, batches))
    if results[-1].value == 0:  # the next checks divide by losses
        return [*results, not_made("all other checks", "the loss is 0")], None
    results += [forward_checks.check_causal_mask(checked, batches),
                forward_checks.check_loss_positions(checked, batches),
                forward_checks.check_layout(checked, batches, consumed_samples),
                forward_checks.check_activations(checked, batches)]
    report("gradients")
    small = small_batch(lambda step: checked.batches(consumed_samples + step * checked.plan.layout.global_batch_size),
                        rank=data_parallel_rank(checked.engine), ranks=data_parallel_size(checked.engine))
    results += _check_gradients(checked, small)
    results = without_false_trails(results)
    if not all(math.isfinite(result.value) for result in results if result.value is not None):
        return [*results, not_made("training", "a loss or gradient is not finite")], None
    update, rate = training_checks.check_update_size(checked, small.micro_batches)
    training_checks.first_steps(checked, consumed_samples, rate)
    learned = training_checks.learn_one_batch(checked, small, steps, rate, report)
    return [*results, update, training_checks.check_one_batch(learned)], learned


def _check_gradients(checked: CheckedEngine, small: SmallBatch) -> list[Result]:
    batches = small.micro_batches
    gradients = checked.gradients(batches)
    return [forward_checks.check_modes(checked, batches),
            training_checks.check_gradients_reach(checked, gradients),
            training_checks.check_gradient_scale_of_layers(gradients),
            training_checks.check_gradient_norm(checked, gradients),
            training_checks.check_gradient_scale(checked, batches, gradients),
            training_checks.check_weight_decay(checked)]


def without_false_trails(results: list[Result]) -> list[Result]:
    """Return the results without failures that follow from another one.

    With far too large initial weights, the loss is so steep that a finite difference says nothing about its gradient.
    """
    wrong = next((result.check for result in results
                  if result.check in ("initial loss", "activations") and result.passed is False), None)
    return [not_made(result.check, f"not compared, because of the failed check: {wrong}")
            if result.check == "gradient scale" and wrong is not None else result for result in results]


def _check_again(plan: Plan, build: Callable[[Plan], DeepSpeedEngine], learned: training_checks.OneBatch,
                 is_exact: bool, report: Report) -> list[Result]:
    """Train two more engines, each with useless inputs. Their first steps equal the run's, and each other's."""
    results, starts = [], []
    for kind in ("shuffled", "zeroed"):
        report("building the engine again")
        checked = CheckedEngine(build(plan), plan)
        starts.append(training_checks.first_steps(checked, plan.args.first_sample, learned.rates[0]))
        loss = training_checks.train_baseline(checked, learned, kind, plan.args.seed, report)
        results.append(training_checks.check_baseline(kind, loss, learned))
        _discard(checked)
    return [*results, training_checks.check_determinism(*starts, is_exact=is_exact)]


def _discard(checked: CheckedEngine) -> None:
    """Free the engine, so that the next one has the device's memory, and does not use this pipeline's topology."""
    checked.engine.destroy()
    del checked.engine
    groups.mpu = None
    gc.collect()
    get_accelerator().empty_cache()


class SanityCheck(Callback):
    """Runs all checks before a run, which is rejected if one of them fails."""

    def before_engine(self, trial: Trial) -> None:
        """Print the table, and append the event "sanity"; collective. Raises ConfigError if a check failed."""
        began = time.perf_counter()
        results = run_checks(trial_plan(trial.plan), trial.build,
                             report=lambda activity: trial.report(f"sanity check: {activity}"))
        dist.barrier()
        remove_trial_files(trial.plan)
        clear_status()
        failed = failed_checks(results)
        print_table(results, active=trial.folder.is_active)
        trial.folder.event("sanity", step=0, reason=f"failed: {', '.join(failed)}" if failed else "all checks passed",
                           seconds=round(time.perf_counter() - began, 1), checks=as_json(results))
        if failed:
            raise ConfigError("--sanity_check", problem=f"{len(failed)} checks failed ({', '.join(failed)})",
                              remedy="the table above says what to do; without the flag, the run would start")


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
