"""Find the samples of a step that stand out, by their losses and the norms of their gradients.

The weights are those from before the step, in the engine of the replay. The reference is the rest of the step, and the
samples of the steps before and after it with the same weights. One forward pass gives the losses of all samples. The
gradient norms of single samples are measured for small steps; in larger ones, halves of the step are compared, and the
half with the larger norm is divided again.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.callback import Callback, Run, StepResult
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.data.samples.read_order import ReadOrder, ranges_text, read_order
from pretrain.extensions.replay.extension import SAMPLES_FILE, ReplayOrder
from pretrain.extensions.replay.sample_passes import Batch, SamplePasses, by_layer

SURE, UNSURE = "sure", "unsure"
_FEWEST_DIVIDED = 32  # samples of a step that is divided into halves
_REFERENCE_GRADIENTS = 8  # samples of each neighbouring step
_MOST_FOUND = 8  # samples that are found by halves
_MOST_REPORTED = 32
_HIGHEST = 3  # samples that are shown where none stands out
_SURE, _UNSURE = 12.0, 9.0  # see `strength`
_SMALLEST_SPREAD = 0.04  # in the logarithm of a loss, or of a gradient norm: 4%


@dataclass(frozen=True)
class OddSample:
    """A sample that stands out, or one with a high loss that does not."""

    id: int  # its place in the order of the data
    loss: float
    loss_z: float  # distance from the median in robust standard deviations, of the logarithm
    grad_norm: float  # norm for the mean loss of the sample alone; NaN: not measured
    grad_z: float
    certainty: str  # SURE, UNSURE, or "": it does not stand out
    token_losses: list[float] = field(default_factory=list)  # loss of each label


@dataclass(frozen=True)
class SampleReport:
    """Findings of `examine_samples` about a step."""

    step: int
    ids: list[int]  # ids of all samples of the step
    loss: float  # loss of the step
    grad_norm: float
    usual_loss: float  # median of the reference
    usual_grad_norm: float  # norm of a step: median of the neighbouring steps
    usual_sample_norm: float  # norm of a single sample
    odd: list[OddSample]
    layers: dict[str, list[float]]  # gradient norm of the step by layer, and that of the neighbouring steps
    tensors: dict[str, list[float]]  # the same of each parameter
    highest: list[OddSample] = field(default_factory=list)  # samples of highest loss, where none stands out
    with_all: list[tuple[float, float]] = field(default_factory=list)
    """loss and gradient norm of the step and of those after it"""
    without_odd: list[tuple[float, float]] = field(default_factory=list)  # the same with the samples left out
    passes: int = 0  # passes over samples that this took

    @property
    def skip(self) -> str:
        """Value of --skip_samples that leaves the samples out; "" if none stands out."""
        return ranges_text([odd.id for odd in self.odd if odd.certainty == SURE] or [odd.id for odd in self.odd])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "skip": self.skip}


def examine_ordered(order: ReplayOrder, engine: DeepSpeedEngine, plan: Plan, step: int, consumed_samples: int,
                    before: Callable[[], None]) -> None:
    """Examine the samples of a step before it is trained, if the order asks for it: RUN/samples.json."""
    if order.steps_after is None or step != order.step:
        return
    report = examine_samples(engine, plan, step=step, consumed_samples=consumed_samples, before=before,
                             steps_after=order.steps_after)
    if dist.get_rank() == 0:
        write_atomically(Path(plan.args.save) / SAMPLES_FILE, json.dumps(report.to_json(), indent=1))


def examine_samples(engine: DeepSpeedEngine, plan: Plan, *, step: int, consumed_samples: int, steps_after: int,
                    before: Callable[[], None]) -> SampleReport:
    """Examine the samples of the next step of the engine; collective. Leaves the engine as it was, bit for bit.

    Args:
        step: number of that step, from 1.
        consumed_samples: data position at its beginning.
        steps_after: further steps that are trained with and without the samples that stand out.
        before: is called before each pass.
    """
    passes = [0]

    def count() -> None:
        passes[0] += 1
        before()

    engine_passes = SamplePasses(engine, plan, count)
    with engine_passes.restored(step - 1, consumed_samples) as load:
        found = _Examination(engine_passes, plan, consumed_samples)
        report = found.report(step)
        if report.odd:
            load()
            with_all = engine_passes.train(consumed_samples, steps_after + 1, plan.read_order)
            load()
            without = engine_passes.train(consumed_samples, steps_after + 1, with_skipped(plan, report.skip))
            report = SampleReport(**{**report.__dict__, "with_all": with_all, "without_odd": without})
    return SampleReport(**{**report.__dict__, "passes": passes[0]})


def with_skipped(plan: Plan, skip: str) -> ReadOrder:
    """Return the order of the plan with more samples left out."""
    return read_order(",".join(filter(None, [plan.args.skip_samples, skip])), plan.args.reorder_samples)


class _Examination:
    """The measurements of a step and its neighbours."""

    def __init__(self, passes: SamplePasses, plan: Plan, consumed_samples: int) -> None:
        sizes, self._passes = plan.length.batch_sizes, passes
        positions = [consumed_samples + sizes.at(consumed_samples)]
        if consumed_samples - plan.args.first_sample >= sizes.ending_at(consumed_samples):
            positions.insert(0, consumed_samples - sizes.ending_at(consumed_samples))
        self.batch = passes.batch(consumed_samples)
        self.neighbours = [passes.batch(position) for position in positions]
        self.token_losses_NT = passes.token_losses(self.batch)
        self.losses = sample_losses(self.batch, self.token_losses_NT)
        self.other_losses = np.concatenate([sample_losses(other, passes.token_losses(other))
                                            for other in self.neighbours])

    def report(self, step: int) -> SampleReport:
        """Measure the gradients, and compare."""
        whole = self._passes.gradient(self.batch, by_parameter=True)
        others = [self._passes.gradient(other, by_parameter=True) for other in self.neighbours]
        reference = [self._passes.gradient(other, [sample]).norm for other in self.neighbours
                     for sample in _spread(len(other.ids), _REFERENCE_GRADIENTS)]
        loss_z = robust_z(self.losses, self.other_losses)
        norms = sample_norms(loss_z, np.array(reference),
                             lambda samples: self._passes.gradient(self.batch, samples).norm)
        grad_z = robust_z(np.array([norms.get(number, math.nan) for number in range(len(self.batch.ids))]),
                          np.array(reference))
        odd = [self._odd(number, loss_z[number], norms.get(number, math.nan), grad_z[number])
               for number in range(len(self.batch.ids)) if certainty(loss_z[number], grad_z[number])]
        odd.sort(key=lambda each: (each.certainty != SURE, -strength(each.loss_z, each.grad_z)))
        highest = [] if odd else [self._odd(number, loss_z[number], norms.get(number, math.nan), grad_z[number])
                                  for number in highest_losses(self.losses)]
        tensors = {name: [norm, float(np.median([other.norms[name] for other in others]))]
                   for name, norm in whole.norms.items()}
        layers = {name: [norm, float(np.median([by_layer(other.norms)[name] for other in others]))]
                  for name, norm in by_layer(whole.norms).items()}
        return SampleReport(step, self.batch.ids, whole.loss, whole.norm, float(np.nanmedian(self.other_losses)),
                            float(np.median([other.norm for other in others])), float(np.median(reference)),
                            odd[:_MOST_REPORTED], layers, tensors, highest)

    def _odd(self, number: int, loss_z: float, norm: float, grad_z: float) -> OddSample:
        rows = slice(number * self.batch.parts, (number + 1) * self.batch.parts)
        return OddSample(self.batch.ids[number], float(self.losses[number]), float(loss_z), norm, float(grad_z),
                         certainty(loss_z, grad_z), [round(loss, 4) for loss in
                                                     self.token_losses_NT[rows].flatten().tolist()])


def sample_norms(loss_z: Any, reference: Any, norm_of: Callable[[Sequence[int]], float]) -> dict[int, float]:
    """Return gradient norms of single samples: of all, or of those that stand out by their loss or by halves.

    `norm_of`: returns the gradient norm of the mean loss of samples. `reference`: norms of single other samples.
    """
    number = len(loss_z)
    if number < _FEWEST_DIVIDED:
        return {sample: norm_of([sample]) for sample in range(number)}
    strongest = np.argsort(-np.abs(np.nan_to_num(loss_z, nan=0.0)))[:_MOST_FOUND].tolist()
    norms = {sample: norm_of([sample]) for sample in strongest if certainty(loss_z[sample], math.nan)}
    left = [sample for sample in range(number) if sample not in norms]
    for _ in range(_MOST_FOUND):
        sample = _largest(left, norm_of)
        norms[sample] = norm_of([sample])
        if not certainty(float(loss_z[sample]), float(robust_z(np.array([norms[sample]]), reference)[0])):
            break
        left.remove(sample)
    return norms


def _largest(samples: Sequence[int], norm_of: Callable[[Sequence[int]], float]) -> int:
    """Return a sample that makes its half, the half of that half, ... have the larger gradient."""
    while len(samples) > 1:
        halves = samples[:len(samples) // 2], samples[len(samples) // 2:]
        norms = [norm_of(half) * len(half) for half in halves]
        samples = halves[0] if not norms[0] < norms[1] else halves[1]
    return samples[0]


def sample_losses(batch: Batch, token_losses_NT: torch.Tensor) -> Any:
    """Return the mean loss of each sample, over the labels that count; NaN if none counts."""
    total = (token_losses_NT * batch.weights_NT).double().view(len(batch.ids), -1).sum(1)
    weight = batch.weights_NT.double().view(len(batch.ids), -1).sum(1)
    return torch.where(weight > 0, total / weight, torch.nan).numpy()


def highest_losses(losses: Any) -> list[int]:
    """Return the samples of highest loss, the highest first, without samples that have no loss (NaN)."""
    return [int(number) for number in np.argsort(-losses, kind="stable") if not math.isnan(losses[number])][:_HIGHEST]


def robust_z(values: Any, reference: Any) -> Any:
    """Return how far each logarithm is from the median, in units of 1.48 times the median absolute deviation.

    The median and the deviation are those of the reference and the values together. NaN: not measured. A value that is
    not finite is infinitely far.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs, all_logs = np.log(values), np.log(np.concatenate([values, reference]))
    known = all_logs[np.isfinite(all_logs)]
    center = np.median(known)
    spread = max(1.4826 * np.median(np.abs(known - center)), _SMALLEST_SPREAD)
    return np.where(np.isposinf(values), np.inf, (logs - center) / spread)


def certainty(loss_z: float, grad_z: float) -> str:
    """Return whether a sample stands out: SURE, UNSURE, or "" if it does not. NaN: not measured."""
    found = strength(loss_z, grad_z)
    return SURE if found >= _SURE else UNSURE if found >= _UNSURE else ""


def strength(loss_z: float, grad_z: float) -> float:
    """Return how far a sample is from the others, in both distances together.

    A low loss counts half: tables and lists, of which each text has some, are easy to predict. A small gradient does
    not count.
    """
    loss_z, grad_z = (0.0 if math.isnan(value) else value for value in (loss_z, grad_z))
    return math.hypot(max(loss_z, -loss_z / 2), max(grad_z, 0.0))


def _spread(number: int, most: int) -> list[int]:
    """Return at most `most` evenly spread numbers below `number`."""
    return sorted({index * number // min(most, number) for index in range(min(most, number))})


class ReplayedSteps(Callback):
    """Trains some steps of a run again, and ends after the examined step, without a save."""

    order = 5

    def __init__(self, order: ReplayOrder) -> None:
        self._replay = order
        self.reads_norm = bool(order.vetoed)

    def start(self, run: Run) -> None:
        self._run = run
        if self._replay.consumed_samples is not None:
            run.consumed_samples = self._replay.consumed_samples

    def before_step(self, run: Run, micro_batches: list[MicroBatch]) -> None:
        examine_ordered(self._replay, run.engine, run.plan, run.step, run.consumed_samples,
                        lambda: run.watchdog.enter("eval", run.step))
        run.watchdog.enter("step", run.step)

    def rejects(self, scaled_norm: object) -> bool:
        """Skip the updates that the run skipped because of a spike."""
        return self._run.step in self._replay.vetoed

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.step == self._replay.step:
            run.stop("replay", save=False, is_done=True)
