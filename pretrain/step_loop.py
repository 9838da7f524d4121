"""The loop over optimizer steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from pretrain.analysis.evaluate.run_tasks import RunTasks
from pretrain.analysis.replay.order import ReplayOrder
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.plan import Plan
from pretrain.data.data_spec import names_of_split
from pretrain.data.loader import Loader, evaluation_batches
from pretrain.distributed.collectives import from_rank_0
from pretrain.engine.attachments import attachments
from pretrain.engine.build import DeepSpeedEngine
from pretrain.engine.steps import eval_batch, learning_rate_of_update, train_batch
from pretrain.monitor.announce import EARLY_STOP, REPLAYED, BatchRamp, announce_end, early_end_line
from pretrain.monitor.flight.recorder import REQUEST, FlightRecorder
from pretrain.monitor.meter import Meter
from pretrain.monitor.predictions import Predictions
from pretrain.monitor.profiler import Profiler
from pretrain.monitor.timeline import PipelineTimeline
from pretrain.resilience.data_watch import DataWatch
from pretrain.resilience.guard import BadSteps, Guard
from pretrain.resilience.recompute import Recomputation
from pretrain.resilience.replicas import ReplicaCheck
from pretrain.resilience.requests import Request, Requests
from pretrain.resilience.rollback import roll_back
from pretrain.resilience.run_lock import RunLock
from pretrain.resilience.watchdog import Watchdog


@dataclass(frozen=True)
class StepCallbacks:
    """Functions that the step loop calls before and after each step.

    Their first argument is the number of the step since this process started, from 1.
    """

    before_step: Callable[[int, DeepSpeedEngine], None] = lambda *_: None
    after_step: Callable[[int, Callable[[str], None]], None] = lambda *_: None  # given a function that prints
    replay: ReplayOrder | None = None  # the process trains some steps of a run again
    # (engine, plan, step of the run, data position before it, function that reports progress); leaves all as it was
    examine: Callable[[DeepSpeedEngine, Plan, int, int, Callable[[], None]], None] = lambda *_: None


@dataclass(frozen=True)
class StepLoop:
    """The loop over optimizer steps: train, log, check, evaluate, save, and stop on request."""

    plan: Plan
    engine: DeepSpeedEngine
    loaders: dict[str, Loader]  # by the names of the plan's datasets
    predictions: Predictions
    tasks: RunTasks
    meter: Meter
    recorder: FlightRecorder
    profiler: Profiler
    timeline: PipelineTimeline
    saver: Saver
    requests: Requests
    data_watch: DataWatch
    guard: Guard  # against bad steps
    replicas: ReplicaCheck
    recomputation: Recomputation
    watchdog: Watchdog
    lock: RunLock
    batch_ramp: BatchRamp
    callbacks: StepCallbacks

    def run(self, first_step: int, consumed_samples: int) -> tuple[int, str]:
        """Train steps `first_step` + 1 to the last one. A request to stop ends the loop earlier.

        Returns the last step that was trained, and why the run was stopped, or "".
        """
        step, steps_here, request = first_step, 0, Request()
        self.meter.restart(step, consumed_samples)
        while step < self.plan.last_step and not request.stop:
            step, steps_here = step + 1, steps_here + 1
            self.profiler.before_step(step)
            self.timeline.before_step(step)
            self.watchdog.enter("data", step)
            micro_batches = self.meter.timed_data(self.loaders["train"].step, consumed_samples)
            self.callbacks.examine(self.engine, self.plan, step, consumed_samples,
                                   partial(self.watchdog.enter, "eval", step))
            self.watchdog.enter("step", step)
            self.callbacks.before_step(steps_here, self.engine)
            self.recorder.before_step(step, micro_batches, consumed_samples)
            self.recomputation.before_step(step, is_saved=self._is_due(step, self.plan.args.save_interval))
            loss = train_batch(self.engine, micro_batches)
            consumed_samples += self.batch_ramp.size_at(step, consumed_samples)
            self.recorder.after_step(loss, consumed_samples)
            self.meter.log(step, loss, learning_rate_of_update(self.engine), consumed_samples)
            self.callbacks.after_step(steps_here, self.meter.screen.line)
            if self.callbacks.replay is not None and step == self.callbacks.replay.step:
                return step, REPLAYED
            bad_steps = self.guard.observe(step, loss, consumed_samples)
            if bad_steps is not None:
                step, consumed_samples = self._roll_back(bad_steps)
                continue
            self.replicas.check(step)
            eval_loss = self._evaluate_if_due(step, consumed_samples)
            self._score_tasks_if_due(step, consumed_samples)
            self.saver.poll()
            self.data_watch.poll(step)
            request = self._or_early_stop(self.requests.poll(step), step)
            self.profiler.request(request.profile_steps)
            if request.record:
                self.recorder.keep(step, REQUEST)
            if self._is_due(step, self.plan.args.save_interval) or request.needs_checkpoint:
                self._save(step, consumed_samples, eval_loss,
                           wait=step == self.plan.last_step or request.needs_checkpoint)
        if step == self.plan.train_steps or request.stop == EARLY_STOP:
            self._evaluate("test", step, consumed_samples)
        return step, request.stop

    def evaluate_missing(self, splits: list[str], step: int, consumed_samples: int) -> tuple[int, str]:
        """Make the last evaluations of a run that was killed before them. Returns what `run` returned or would have."""
        for split in splits:
            self._evaluate(split, step, consumed_samples)
        return step, EARLY_STOP if attachments(self.engine).early_stopping.is_over else ""

    def close(self, step: int, stopped_by: str) -> None:
        """Finish background work, and announce the end. The arguments are the results of `run`."""
        self.watchdog.enter("end", step)
        for loader in self.loaders.values():
            loader.close()
        self.saver.close(wait_for_copies=stopped_by in ("", EARLY_STOP))
        self.requests.close()
        self.data_watch.close()
        self.recorder.close()
        self.profiler.close()
        self.timeline.close()
        self.meter.close()
        announce_end(self.plan, step, stopped_by, self.meter.losses, self.meter.screen, self.meter.folder)

    def _is_due(self, step: int, interval: int) -> bool:
        return step == self.plan.last_step or (interval > 0 and step % interval == 0)

    def _or_early_stop(self, request: Request, step: int) -> Request:
        """Return a request to stop if early stopping ends the run before its last step, otherwise `request`."""
        early = attachments(self.engine).early_stopping
        if not early.is_over or step == self.plan.train_steps:
            return request
        self.meter.folder.event(EARLY_STOP, step=step, reason=early.reason(), best=early.best,
                                best_step=early.best_step)
        self.meter.screen.line(early_end_line(self.plan, step, early.reason()))
        return replace(request, stop=EARLY_STOP)

    def _roll_back(self, bad: BadSteps) -> tuple[int, int]:
        """Return to an earlier checkpoint. Returns its step, and the data position after the skipped samples."""
        self.watchdog.enter("rollback", bad.last_step)
        self.lock.confirm(now=True)
        step, consumed_samples = roll_back(self.engine, self.plan, self.saver, self.meter.folder, self.meter.screen,
                                           bad)
        self.guard.return_to(step)
        self.replicas.check(step, force=True)
        self.meter.restart(step, consumed_samples)
        return step, consumed_samples

    def _save(self, step: int, consumed_samples: int, eval_loss: float | None, *, wait: bool) -> None:
        self.watchdog.enter("save", step)
        with self.meter.outside_steps("save"):
            self.replicas.check(step, force=True)
            self.lock.confirm(now=True)
            # a checkpoint between bad steps has the weights from before them: it must not replace a rollback's
            self.saver.save(self.engine, step=step, consumed_samples=consumed_samples, eval_loss=eval_loss, wait=wait,
                            prune=not self.guard.in_bad_steps)

    def _evaluate_if_due(self, step: int, consumed_samples: int) -> float | None:
        if not self._is_due(step, self.plan.args.eval_interval):
            return None
        loss = self._evaluate("valid", step, consumed_samples)
        if loss is not None:
            attachments(self.engine).early_stopping.observe(step, from_rank_0(lambda: loss))
        with self.meter.outside_steps("eval"):
            self.predictions.write(step, consumed_samples, before=lambda: self.watchdog.enter("eval", step))
        return loss

    def _score_tasks_if_due(self, step: int, consumed_samples: int) -> None:
        args = self.plan.args
        interval = args.eval_interval if args.eval_tasks_interval is None else args.eval_tasks_interval
        if args.eval_tasks is None or not self._is_due(step, interval):
            return
        self.meter.screen.status(f"step {step}/{self.plan.train_steps}  scoring tasks")
        with self.meter.outside_steps("eval"):
            scores, failure = self.tasks.scores(before_batch=lambda: self.watchdog.enter("eval", step))
        self.meter.log_tasks(step, scores, consumed_samples, failure=failure)

    def _evaluate(self, split: str, step: int, consumed_samples: int) -> float | None:
        """Report the mean loss of the first --eval_steps global batches of each set of the split.

        Returns the loss; of named sets, the mean of their losses; None if the split has no data.
        """
        losses: dict[str, float] = {}
        for name in names_of_split(self.loaders, split):
            self.meter.screen.status(f"step {step}/{self.plan.train_steps}  evaluating on {name} data")
            with self.meter.outside_steps("eval"):
                loss = float(evaluate(self.engine, self.loaders[name], self.plan.args.eval_steps,
                                      before_batch=lambda: self.watchdog.enter("eval", step)))
            losses[name] = self.meter.log_eval(step, name, loss, consumed_samples)
        if losses and split not in losses:
            return self.meter.log_eval(step, split, sum(losses.values()) / len(losses), consumed_samples,
                                       num_sets=len(losses))
        return losses.get(split)


def evaluate(engine: DeepSpeedEngine, loader: Loader, eval_steps: int,
             before_batch: Callable[[], None]) -> torch.Tensor:
    """Return the mean loss of the first `eval_steps` global batches of the loader: a scalar on the device."""
    losses = []
    for batch in evaluation_batches(loader, eval_steps):
        before_batch()
        losses.append(eval_batch(engine, batch))
    return torch.stack(losses).mean()
