"""The loop over optimizer steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pretrain.callback import Callbacks, Run, StepResult
from pretrain.checkpoint.save.saver import Saver
from pretrain.data.data_spec import names_of_split
from pretrain.data.loader import Loader, evaluation_batches
from pretrain.distributed.collectives import from_rank_0
from pretrain.engine.build import DeepSpeedEngine
from pretrain.engine.steps import eval_batch, learning_rate_of_update, train_batch
from pretrain.monitor.announce import announce_end
from pretrain.resilience.guard import BadSteps, Guard
from pretrain.resilience.requests import Request, Requests
from pretrain.resilience.rollback import roll_back
from pretrain.resilience.run_lock import RunLock


@dataclass(frozen=True)
class StepLoop:
    """The loop over optimizer steps: train, log, evaluate, save, roll back, and stop on request."""

    run: Run
    call: Callbacks  # call("after_step", run, ...) calls all callbacks that have this point
    guard: Guard  # against bad steps
    saver: Saver
    requests: Requests
    lock: RunLock

    def train(self) -> str:
        """Train to the last step, or until the run is stopped. Returns why it was stopped, or ""."""
        run, call = self.run, self.call
        run.meter.restart(run.step, run.consumed_samples)
        while run.step < run.plan.last_step and not run.stopped_by:
            run.step, run.steps_here = run.step + 1, run.steps_here + 1
            call("begin_step", run)
            run.watchdog.enter("data", run.step)
            micro_batches = run.meter.timed_data(run.loaders["train"].step, run.consumed_samples)
            run.watchdog.enter("step", run.step)
            call("before_step", run, micro_batches)
            loss = train_batch(run.engine, micro_batches)
            result = StepResult(loss, learning_rate_of_update(run.engine))
            run.consumed_samples += run.plan.length.batch_sizes.at(run.consumed_samples)
            call("after_step", run, result)
            run.meter.log(run, result)
            if run.stopped_by and not run.saves_at_stop:
                return run.stopped_by
            bad_steps = self.guard.observe(run.step, loss, run.consumed_samples)
            if bad_steps is not None:
                self._roll_back(bad_steps)
                continue
            call("accepted", run)
            eval_loss = self._evaluate_if_due()
            call("end_step", run)
            self.saver.poll()
            request = self._poll_requests()
            if run.stopped_by and not run.saves_at_stop:
                return run.stopped_by
            if run.is_due(run.plan.args.save_interval) or request.needs_checkpoint:
                self._save(eval_loss, wait=run.step == run.plan.last_step or request.needs_checkpoint)
        if run.step == run.plan.train_steps or (run.is_done and run.saves_at_stop):
            self.evaluate("test")
        return run.stopped_by

    def close(self) -> None:
        """Finish background work, and announce the end of the run."""
        run = self.run
        run.watchdog.enter("end", run.step)
        for loader in run.loaders.values():
            loader.close()
        self.saver.close(wait_for_copies=run.is_done or not run.stopped_by)
        self.requests.close()
        self.call("close", run)
        run.meter.close()
        announce_end(run.plan, run.step, run.stopped_by, run.meter.losses, run.screen, run.folder,
                     is_done=run.is_done, is_saved=run.saves_at_stop)

    def _poll_requests(self) -> Request:
        """Return what the ranks do after this step: what somebody has requested, and what a callback has."""
        run = self.run
        request = self.requests.poll(run.step)
        if request != Request():
            self.call("requested", run, request)
        run.stopped_by = run.stopped_by or request.stop
        return replace(request, stop=run.stopped_by)

    def _roll_back(self, bad: BadSteps) -> None:
        """Return to an earlier checkpoint, and to the data after the skipped samples."""
        run = self.run
        run.watchdog.enter("rollback", bad.last_step)
        self.lock.confirm(now=True)
        run.step, run.consumed_samples = roll_back(run.engine, run.plan, self.saver, run.folder, run.screen, bad)
        self.guard.return_to(run.step)
        run.stopped_by, run.is_done = "", False  # what a callback has found in steps that are undone
        self.call("rolled_back", run)
        run.meter.restart(run.step, run.consumed_samples)

    def _save(self, eval_loss: float | None, *, wait: bool) -> None:
        run = self.run
        run.watchdog.enter("save", run.step)
        with run.meter.outside_steps("save"):
            self.call("before_save", run)
            self.call.check_states(run)
            self.lock.confirm(now=True)
            # a checkpoint between bad steps has the weights from before them: it must not replace a rollback's
            self.saver.save(run.engine, step=run.step, consumed_samples=run.consumed_samples, eval_loss=eval_loss,
                            wait=wait, prune=not self.guard.in_bad_steps)

    def _evaluate_if_due(self) -> float | None:
        if not self.run.is_due(self.run.plan.args.eval_interval):
            return None
        loss = self.evaluate("valid")
        loss = None if loss is None else from_rank_0(lambda: loss)
        self.call("after_evaluation", self.run, loss)
        return loss

    def evaluate(self, split: str) -> float | None:
        """Report the mean loss of the first --eval_steps global batches of each set of the split.

        Returns the loss; of named sets, the mean of their losses; None if the split has no data.
        """
        run = self.run
        losses: dict[str, float] = {}
        for name in names_of_split(run.loaders, split):
            run.screen.status(f"step {run.step}/{run.plan.train_steps}  evaluating on {name} data")
            with run.meter.outside_steps("eval"):
                loss = float(evaluate(run.engine, run.loaders[name], run.plan.args.eval_steps,
                                      before_batch=lambda: run.watchdog.enter("eval", run.step)))
            losses[name] = run.meter.log_eval(run, name, loss)
        if losses and split not in losses:
            return run.meter.log_eval(run, split, sum(losses.values()) / len(losses), num_sets=len(losses))
        return losses.get(split)


def evaluate(engine: DeepSpeedEngine, loader: Loader, eval_steps: int,
             before_batch: Callable[[], None]) -> torch.Tensor:
    """Return the mean loss of the first `eval_steps` global batches of the loader: a scalar on the device."""
    losses = []
    for batch in evaluation_batches(loader, eval_steps):
        before_batch()
        losses.append(eval_batch(engine, batch))
    return torch.stack(losses).mean()
