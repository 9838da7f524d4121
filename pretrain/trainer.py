"""Train a plan: connect the ranks, build the engine, load the checkpoint, run the step loop, shut down."""

import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pretrain.active_extensions import callbacks_of, request_files
from pretrain.callback import Callback, Callbacks, Run, Trial
from pretrain.checkpoint.format.fragments import owned_weights
from pretrain.checkpoint.load.agree_on_checkpoint import agree_on_checkpoint, agree_on_data, verify_weights
from pretrain.checkpoint.load.init_from import InitialWeights
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint, load_weights
from pretrain.checkpoint.load.resume import Resume
from pretrain.checkpoint.save.retention import position_after
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.equal_facts import run_facts
from pretrain.config.plan import Plan
from pretrain.data.data_spec import names_of_split
from pretrain.distributed.collectives import call_after_polls, from_rank_0, gather, gather_problems
from pretrain.distributed.process_group import init_process_group, leave_process_group
from pretrain.distributed.world import World
from pretrain.engine.attachments import attachments
from pretrain.engine.build import DeepSpeedEngine, build_engine, deepspeed_output, remove_swap_files
from pretrain.engine.layer_times import plan_as_built
from pretrain.engine.phases import time_phases
from pretrain.engine.recipe import keep_states
from pretrain.engine.steps import open_loader
from pretrain.engine.update_guard import guard_updates
from pretrain.engine.update_statistics import measure_updates
from pretrain.errors import CRASHED, FINISHED, STOPPED, ConfigError, counted
from pretrain.monitor.announce import EARLY_STOP, BatchRamp, announce_start
from pretrain.monitor.meter import Meter
from pretrain.monitor.read_run_folder import is_evaluated, newest_recorded
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.early_stopping import EarlyStopping, early_end_line
from pretrain.resilience.guard import Guard
from pretrain.resilience.replicas import ReplicaCheck
from pretrain.resilience.requests import Requests
from pretrain.resilience.run_lock import RunLock, sees_lock
from pretrain.resilience.watchdog import RankGuards, Watchdog
from pretrain.step_loop import StepLoop
from pretrain.terminal import Screen, clear_status, status


def train(plan: Plan, world: World, others: Sequence[Callback], guards: RankGuards,
          weights: InitialWeights | None = None) -> int:
    """Run the plan, resuming from the newest good checkpoint if there is one. Returns the exit code.

    Without a checkpoint, the run begins with `weights`, or with random weights if this is None.

    Args:
        others: callbacks besides those of extensions.
    """
    callbacks = [*callbacks_of(plan), *others]
    try:
        return _train(plan, world, callbacks, guards, weights)
    except (MemoryError, RuntimeError, OSError) as error:
        lines = [line for callback in callbacks for line in callback.explains(error)]
        if not lines:
            raise
        for number, line in enumerate(lines):  # of this rank: other ranks may have no error
            print(f"ds-pretrain: {'' if number else 'error: '}rank {world.rank}: {line}", file=sys.stderr, flush=True)
        return CRASHED


def _train(plan: Plan, world: World, callbacks: Sequence[Callback], guards: RankGuards,
           weights: InitialWeights | None) -> int:
    resume = _connect(plan, world, guards, weights)
    missing = [] if resume is None else from_rank_0(functools.partial(_missing_evaluations, resume))
    if resume is not None and resume.manifest.step >= resume.plan.last_step and not missing:
        return _report_complete(resume.plan, resume)
    is_over = resume is not None and _early_stopping(resume).is_over
    if resume is not None and is_over and not missing:
        return _report_early_stop(resume, world, guards)
    if resume is not None:
        plan = resume.plan
    call = Callbacks([*_core_callbacks(plan), *callbacks])
    call.connected(plan)
    if resume is None or resume.manifest.weights_only:
        call.before_engine(_trial(plan, world, guards,
                                 lambda plan: _build(plan, resume, weights, guards.watchdog).engine))
    start = _build(plan, resume, weights, guards.watchdog, call)
    plan = plan_as_built(plan, start.engine)
    with Screen(active=world.rank == 0) as screen:
        loop = _begin_loop(plan, world, start, call, guards, screen)
        if missing:  # the last evaluations of a run that was killed before them
            for split in missing:
                loop.evaluate(split)
            if is_over:
                loop.run.stop(EARLY_STOP, is_done=True)
        else:
            loop.train()
        loop.close()
    dist.barrier()
    if world.local_rank == 0:
        remove_swap_files(plan)
    leave_process_group()
    return FINISHED if loop.run.is_done or loop.run.step >= plan.last_step else STOPPED


def _core_callbacks(plan: Plan) -> Iterator[Callback]:
    """Yield the callbacks that the core brings; each says in its class when it runs."""
    args = plan.args
    yield from (EarlyStopping.of_flags(args), BatchRamp())
    if args.replica_check_interval:
        yield ReplicaCheck(args.replica_check_interval)


def _trial(plan: Plan, world: World, guards: RankGuards, build: Callable[[Plan], DeepSpeedEngine]) -> Trial:
    """Return what callbacks may use before the engine of the run is built."""
    def report(activity: str) -> None:
        guards.watchdog.enter("trial", 0)
        status(activity)

    folder = RunFolder(Path(plan.args.save), active=world.rank == 0, before_write=guards.lock.confirm)
    return Trial(plan, build, folder, report)


@dataclass(frozen=True)
class _StartPoint:
    """The engine with its weights, and the data position, before the first step of this process."""

    engine: DeepSpeedEngine
    resume: Resume | None  # None: the run begins with new or initial weights
    step: int  # number of steps done
    consumed_samples: int
    warnings: list[str]  # about the weights


def _connect(plan: Plan, world: World, guards: RankGuards, weights: InitialWeights | None) -> Resume | None:
    """Connect the ranks, which then choose the checkpoint to resume from. Without one, they verify the weights."""
    watchdog = guards.watchdog
    with deepspeed_output(plan.args.deepspeed_log_level):
        status(f"connecting {counted(world.size, 'rank')}")
        init_process_group(world, watchdog.time_outs.longest_s, run_facts(plan, "ds-pretrain train", world))
        watchdog.enter("checkpoint", 0)
        call_after_polls(watchdog.beat)
        watchdog.set_ranks(gather((socket.gethostname(), os.getpid())))
        _check_same_folder(Path(plan.args.save), guards.lock)
        agree_on_data(plan)
        resume = agree_on_checkpoint(plan, functools.partial(print, file=sys.stderr, flush=True))
        if resume is None and weights is not None:
            verify_weights(weights)
    clear_status()
    return resume


def _check_same_folder(run: Path, lock: RunLock) -> None:
    """Raise ConfigError on every rank unless all ranks see the run folder of rank 0, by its lock. Collective."""
    token = from_rank_0(lambda: lock.token)
    problems = [] if sees_lock(run, token) else [f"rank {dist.get_rank()} on {socket.gethostname()} has another folder "
                                                 "under this name than rank 0"]
    if found := gather_problems(problems):
        raise ConfigError(f"--save {run}", problem=found[0], remedy="name a folder that all ranks share")


def _build(plan: Plan, resume: Resume | None, weights: InitialWeights | None, watchdog: Watchdog,
           callbacks: Callbacks | None = None) -> _StartPoint:
    """Build the engine, and load the checkpoint or the initial weights, if any; also the states of the callbacks."""
    with deepspeed_output(plan.args.deepspeed_log_level):
        status("building the engine" + (f", loading {resume.folder.name}" if resume else ""))
        watchdog.enter("build", 0)
        layer_times = newest_recorded(Path(plan.args.save), "layer_times") if dist.get_rank() == 0 else None
        engine = build_engine(plan, initialize=resume is None and weights is None, recorded_layer_times=layer_times)
        watchdog.enter("load", 0)
        with_state = {callback.name: callback for callback in callbacks.at("state")} if callbacks else {}
        keep_states(engine, with_state)
        warnings = _restore(engine, plan, resume, weights)
        for callback in with_state.values():
            if callback.of_run and resume is not None and resume.branch is not None:
                callback.set_state(None)
        warnings += [f"the checkpoint has a state of {name}, whose extension this run has not loaded: it is kept for "
                     "the next checkpoint" for name in attachments(engine).unclaimed_states]
        step, consumed_samples = _position(plan, resume)
    clear_status()
    return _StartPoint(engine, resume, step, consumed_samples, warnings)


def _begin_loop(plan: Plan, world: World, start: _StartPoint, callbacks: Callbacks, guards: RankGuards,
                screen: Screen) -> StepLoop:
    """Announce the start, and create the parts of the step loop."""
    engine, resume = start.engine, start.resume
    folder = RunFolder(Path(plan.args.save), active=world.rank == 0, before_write=guards.lock.confirm,
                       warn=screen.line)
    own = attachments(engine)
    own.phase_timers = time_phases(engine)
    meter = Meter(plan, engine, folder, screen, rank=world.rank, first_step=start.step, phases=own.phase_timers,
                  update_size=measure_updates(engine, functools.partial(owned_weights, engine)), callbacks=callbacks)
    saver = Saver(plan, folder, screen)
    requests = Requests(engine.device, folder, guards.launcher, exit_after_minutes=plan.args.exit_after_minutes,
                        committed_step=lambda: saver.committed_step, report=screen.line,
                        asked=request_files(plan.args))
    # after `Requests`: who waits for the start's event may send a signal, which must then be a request to save
    announce_start(plan, world, screen, folder, first_step=start.step,
                   resumed_from=resume.folder if resume and not resume.manifest.weights_only else None,
                   is_branch=resume is not None and resume.branch is not None,
                   warnings=[*(resume.warnings if resume else ()), *start.warnings], operators=own.operators)
    run = Run(plan, world, engine, folder, screen, guards.watchdog, meter, requests.reject, start.step,
              start.consumed_samples, loaders={name: open_loader(engine, plan, name) for name in plan.datasets},
              resume=resume)
    if resume is not None and resume.other_data:
        folder.event("other_data", step=resume.manifest.step, reason=resume.other_data)
    guard = Guard(plan, engine, folder, screen, on_bad_step=functools.partial(callbacks, "bad_step", run))
    guard_updates(engine, guard.veto if plan.args.spike_policy == "skip" else None)
    callbacks("start", run)
    callbacks.check_states(run)  # rather than at the first save
    for callback in callbacks.around_update:
        own.update.add(callback)
    return StepLoop(run, callbacks, guard, saver, requests, guards.lock)


def _report_complete(plan: Plan, resume: Resume) -> int:
    if dist.get_rank() == 0:
        for warning in resume.warnings:
            print(f"warning: {warning}")
        print(f"{plan.args.save} is complete: {resume.manifest.step} of {plan.last_step} steps are done")
    leave_process_group()
    return FINISHED


def _missing_evaluations(resume: Resume) -> list[str]:
    """Return the splits that a finished run has not evaluated after its last step, because it was killed."""
    plan, step = resume.plan, resume.manifest.step
    if resume.branch is not None or (step != plan.train_steps and not _early_stopping(resume).is_over):
        return []
    return [split for split in ("valid", "test")
            if names_of_split(plan.datasets, split) and not is_evaluated(Path(plan.args.save), step, split)]


def _early_stopping(resume: Resume) -> EarlyStopping:
    """Return the state of early stopping in the checkpoint, with this run's flags. A branch counts from 0."""
    stopping = EarlyStopping.of_flags(resume.plan.args)
    if resume.branch is None:
        stopping.set_state(resume.manifest.recipe_states.get(stopping.name))
    return stopping


def _report_early_stop(resume: Resume, world: World, guards: RankGuards) -> int:
    if world.rank == 0:
        print(early_end_line(resume.plan, resume.manifest.step, _early_stopping(resume).reason()))
    # the supervisor would take an end without this event for a crash
    folder = RunFolder(Path(resume.plan.args.save), active=world.rank == 0, before_write=guards.lock.confirm)
    folder.event("stop", step=resume.manifest.step, reason=EARLY_STOP, is_done=True)
    leave_process_group()
    return FINISHED


def _restore(engine: DeepSpeedEngine, plan: Plan, resume: Resume | None,
             weights: InitialWeights | None) -> list[str]:
    """Load the checkpoint to resume from, or the initial weights, if any. Returns warnings about the weights."""
    if resume is None:
        return [] if weights is None else load_weights(engine, weights.files)
    if resume.manifest.weights_only:
        return load_weights(engine, resume.folder)
    warnings = load_checkpoint(engine, plan, resume.folder, resume.manifest)
    if resume.branch is not None or resume.other_data or len(plan.overrides) > len(resume.manifest.overrides):
        attachments(engine).spikes.set_state(None)  # other losses may be usual now
    return warnings


def _position(plan: Plan, resume: Resume | None) -> tuple[int, int]:
    """Return the number of steps done and of samples consumed."""
    if resume is None or resume.manifest.weights_only:
        return 0, plan.args.first_sample
    return resume.manifest.step, from_rank_0(lambda: position_after(resume.folder.parent, resume.manifest))
