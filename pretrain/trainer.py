"""The step loop, with the set-up before it and the shutdown after it."""

import functools
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain.checkpoint.load.agree import agree_on_checkpoint, agree_on_data
from pretrain.checkpoint.load.init_from import InitialWeights, origin_of
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.load.load_weights import load_checkpoint_weights, load_weights, verify_weights
from pretrain.checkpoint.load.resume import Resume
from pretrain.checkpoint.save.rollbacks import position_after
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.validate import Plan
from pretrain.data.datasets.data_spec import names_of_split
from pretrain.data.loader import Loader, evaluation_batches
from pretrain.distributed.collectives import call_after_polls, from_rank_0, gather
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World
from pretrain.engine.build import DeepSpeedEngine, build_engine, deepspeed_output, remove_swap_files
from pretrain.engine.loaders import open_loader
from pretrain.engine.steps import eval_batch, learning_rate, train_batch
from pretrain.engine.update_guard import guard_updates
from pretrain.errors import FINISHED, STOPPED
from pretrain.monitor.announce import announce_end, announce_start
from pretrain.monitor.meter import Meter
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.data_watch import DataWatch
from pretrain.resilience.guard import BadSteps, Guard
from pretrain.resilience.rank_guards import RankGuards
from pretrain.resilience.replica_check import ReplicaCheck
from pretrain.resilience.requests import Request, Requests
from pretrain.resilience.rollback import roll_back
from pretrain.resilience.run_lock import RunLock
from pretrain.resilience.watchdog import Watchdog
from pretrain.terminal.screen import Screen
from pretrain.terminal.status import clear_status, status


@dataclass(frozen=True)
class StepCallbacks:
    """Functions that the step loop calls before and after each step.

    Their first argument is the number of the step since this process started, from 1.
    """

    before_step: Callable[[int, DeepSpeedEngine], None]
    after_step: Callable[[int, Callable[[str], None]], None]  # the second argument prints a line on rank 0


@dataclass(frozen=True)
class StepLoop:
    """The loop over optimizer steps: train, log, check, evaluate, save, and stop on request."""

    plan: Plan
    engine: DeepSpeedEngine
    loaders: dict[str, Loader]  # by the names of the plan's datasets
    meter: Meter
    saver: Saver
    requests: Requests
    data_watch: DataWatch
    guard: Guard  # against bad steps
    replicas: ReplicaCheck
    watchdog: Watchdog
    lock: RunLock
    callbacks: StepCallbacks

    def run(self, first_step: int, consumed_samples: int) -> tuple[int, str]:
        """Train steps `first_step` + 1 to the last one. A request to stop ends the loop earlier.

        Returns the last step that was trained, and why the run was stopped, or "".
        """
        step, steps_here, request = first_step, 0, Request()
        self.meter.restart(step)
        while step < self.plan.last_step and not request.stop:
            step, steps_here = step + 1, steps_here + 1
            self.watchdog.enter("data", step)
            micro_batches = self.meter.timed_data(self.loaders["train"].step, consumed_samples)
            self.watchdog.enter("step", step)
            lr = learning_rate(self.engine)
            self.callbacks.before_step(steps_here, self.engine)
            loss = train_batch(self.engine, micro_batches)
            consumed_samples += self.plan.layout.global_batch_size
            self.meter.log(step, loss, lr, consumed_samples)
            self.callbacks.after_step(steps_here, self.meter.screen.line)
            bad_steps = self.guard.observe(step, loss, consumed_samples)
            if bad_steps is not None:
                step, consumed_samples = self._roll_back(bad_steps)
                continue
            self.replicas.check(step)
            eval_loss = self._evaluate_if_due(step, consumed_samples)
            self.saver.poll()
            self.data_watch.poll(step)
            request = self.requests.poll(step)
            if self._is_due(step, self.plan.args.save_interval) or request.save or request.stop:
                self._save(step, consumed_samples, eval_loss, wait=step == self.plan.last_step or request != Request())
        if step == self.plan.train_steps:
            self._evaluate("test", step, consumed_samples)
        return step, request.stop

    def close(self, step: int, stopped_by: str) -> None:
        """Finish background work, and announce the end. The arguments are the results of `run`."""
        self.watchdog.enter("end", step)
        for loader in self.loaders.values():
            loader.close()
        self.saver.close(wait_for_copies=not stopped_by)
        self.requests.close()
        self.data_watch.close()
        announce_end(self.plan, step, stopped_by, self.meter.losses, self.meter.screen, self.meter.folder)

    def _is_due(self, step: int, interval: int) -> bool:
        return step == self.plan.last_step or (interval > 0 and step % interval == 0)

    def _roll_back(self, bad: BadSteps) -> tuple[int, int]:
        """Return to an earlier checkpoint. Returns its step, and the data position after the skipped samples."""
        self.watchdog.enter("rollback", bad.last_step)
        self.lock.confirm(now=True)
        step, consumed_samples = roll_back(self.engine, self.plan, self.saver, self.meter.folder, self.meter.screen,
                                           bad)
        self.guard.return_to(step)
        self.replicas.check(step, force=True)
        self.meter.restart(step)
        return step, consumed_samples

    def _save(self, step: int, consumed_samples: int, eval_loss: float | None, *, wait: bool) -> None:
        self.watchdog.enter("save", step)
        self.replicas.check(step, force=True)
        self.lock.confirm(now=True)
        # a checkpoint between bad steps has the weights from before them: it must not replace those to roll back to
        self.saver.save(self.engine, step=step, consumed_samples=consumed_samples, eval_loss=eval_loss, wait=wait,
                        prune=not self.guard.in_bad_steps)
        self.meter.restart(step)

    def _evaluate_if_due(self, step: int, consumed_samples: int) -> float | None:
        if not self._is_due(step, self.plan.args.eval_interval):
            return None
        return self._evaluate("valid", step, consumed_samples)

    def _evaluate(self, split: str, step: int, consumed_samples: int) -> float | None:
        """Report the mean loss of the first --eval_steps global batches of each set of the split.

        Returns the loss; of named sets, the mean of their losses; None if the split has no data.
        """
        losses: dict[str, float] = {}
        for name in names_of_split(self.loaders, split):
            self.meter.screen.status(f"step {step}/{self.plan.train_steps}  evaluating on {name} data")
            loss = evaluate(self.engine, self.loaders[name], self.plan.args.eval_steps,
                            before_batch=lambda: self.watchdog.enter("eval", step))
            losses[name] = self.meter.log_eval(step, name, float(loss), consumed_samples)
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


def train(plan: Plan, world: World, callbacks: StepCallbacks, guards: RankGuards,
          weights: InitialWeights | None = None) -> int:
    """Run the plan, resuming from the newest good checkpoint if there is one. Returns the exit code.

    Without a checkpoint, the run begins with `weights`, or with random weights if this is None.
    """
    resume = _connect(plan, world, guards.watchdog, weights)
    if resume is not None and resume.manifest.step >= plan.last_step:
        return _report_complete(plan, resume)
    if resume is not None:
        plan = replace(plan, origin=origin_of(resume.folder, resume.manifest))
    start = _build(plan, resume, weights, guards.watchdog)
    with Screen(active=world.rank == 0) as screen:
        loop = _begin_loop(plan, world, start, callbacks, guards, screen)
        step, stopped_by = loop.run(start.step, start.consumed_samples)
        loop.close(step, stopped_by)
    dist.barrier()
    if world.local_rank == 0:
        remove_swap_files(plan)
    dist.destroy_process_group()
    return STOPPED if step < plan.last_step else FINISHED


@dataclass(frozen=True)
class _StartPoint:
    """The engine with its weights, and the data position, before the first step of this process."""

    engine: DeepSpeedEngine
    resume: Resume | None  # None: the run begins with new or initial weights
    step: int  # number of steps done
    consumed_samples: int


def _connect(plan: Plan, world: World, watchdog: Watchdog, weights: InitialWeights | None) -> Resume | None:
    """Connect the ranks, which then choose the checkpoint to resume from. Without one, they verify the weights."""
    with deepspeed_output(plan.args.deepspeed_log_level):
        status(f"connecting {world.size} rank{'s' * (world.size > 1)}")
        init_process_group(world, watchdog.time_outs.longest_s)
        watchdog.enter("checkpoint", 0)
        call_after_polls(watchdog.beat)
        watchdog.set_ranks(gather((socket.gethostname(), os.getpid())))
        agree_on_data(plan)
        resume = agree_on_checkpoint(plan, functools.partial(print, file=sys.stderr, flush=True))
        if resume is None and weights is not None:
            verify_weights(weights)
    clear_status()
    return resume


def _build(plan: Plan, resume: Resume | None, weights: InitialWeights | None, watchdog: Watchdog) -> _StartPoint:
    """Build the engine, and load the checkpoint or the initial weights, if any."""
    with deepspeed_output(plan.args.deepspeed_log_level):
        status("building the engine" + (f", loading {resume.folder.name}" if resume else ""))
        watchdog.enter("build", 0)
        engine = build_engine(plan, initialize=resume is None and weights is None)
        watchdog.enter("load", 0)
        step, consumed_samples = _restore(engine, plan, resume, weights)
    clear_status()
    return _StartPoint(engine, resume, step, consumed_samples)


def _begin_loop(plan: Plan, world: World, start: _StartPoint, callbacks: StepCallbacks, guards: RankGuards,
                screen: Screen) -> StepLoop:
    """Announce the start, and create the parts of the step loop."""
    engine, resume = start.engine, start.resume
    folder = RunFolder(Path(plan.args.save), active=world.rank == 0, before_write=guards.lock.confirm,
                       warn=screen.line)
    meter = Meter(plan, engine, folder, screen, rank=world.rank, first_step=start.step)
    saver = Saver(plan, folder, screen)
    requests = Requests(engine.device, folder, guards.launcher, exit_after_minutes=plan.args.exit_after_minutes,
                        committed_step=lambda: saver.committed_step, report=screen.line)
    loaders = {name: open_loader(engine, plan, name) for name in plan.datasets}
    # after `Requests`: who waits for the start's event may send a signal, which must then be a request to save
    announce_start(plan, world, screen, folder, first_step=start.step,
                   resumed_from=resume.folder if resume and not resume.manifest.weights_only else None,
                   warnings=resume.warnings if resume else ())
    guard = Guard(plan, engine, folder, screen)
    guard_updates(engine, guard.veto if plan.args.spike_policy == "skip" else None)
    data_watch = DataWatch(plan, resume, reject=requests.reject, folder=folder, screen=screen, active=world.rank == 0)
    return StepLoop(plan, engine, loaders, meter=meter, saver=saver, requests=requests, data_watch=data_watch,
                    guard=guard, replicas=ReplicaCheck(plan, engine, folder), watchdog=guards.watchdog,
                    lock=guards.lock, callbacks=callbacks)


def _report_complete(plan: Plan, resume: Resume) -> int:
    if dist.get_rank() == 0:
        for warning in resume.warnings:
            print(f"warning: {warning}")
        print(f"{plan.args.save} is complete: {resume.manifest.step} of {plan.last_step} steps are done")
    dist.destroy_process_group()
    return FINISHED


def _restore(engine: DeepSpeedEngine, plan: Plan, resume: Resume | None,
             weights: InitialWeights | None) -> tuple[int, int]:
    """Load the checkpoint to resume from, or the initial weights, if any.

    Returns the number of steps done and of samples consumed.
    """
    if resume is None:
        if weights is not None:
            load_weights(engine, weights)
        return 0, plan.args.first_sample
    if resume.manifest.weights_only:
        load_checkpoint_weights(engine, resume.folder)
        return 0, plan.args.first_sample
    load_checkpoint(engine, plan, resume.folder, resume.manifest)
    return resume.manifest.step, from_rank_0(lambda: position_after(resume.folder.parent, resume.manifest))
