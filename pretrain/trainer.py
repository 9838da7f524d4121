"""Train a plan: connect the ranks, build the engine, load the checkpoint, run the step loop, shut down."""

import functools
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.analysis.evaluate.run_tasks import LoadedTasks, RunTasks, load_run_tasks
from pretrain.analysis.sanity.run_checks import check_before_start
from pretrain.checkpoint.format.fragments import held_states, owned_weights
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
from pretrain.engine.collective_waits import measure_waits
from pretrain.engine.layer_times import plan_as_built
from pretrain.engine.phases import time_phases
from pretrain.engine.recipe import EarlyStopping
from pretrain.engine.steps import open_loader
from pretrain.engine.update_guard import guard_updates
from pretrain.engine.update_statistics import measure_updates
from pretrain.errors import FINISHED, STOPPED, ConfigError, counted
from pretrain.monitor.announce import EARLY_STOP, REPLAYED, BatchRamp, announce_start, early_end_line
from pretrain.monitor.flight.recorder import begin_record
from pretrain.monitor.meter import Meter
from pretrain.monitor.predictions import Predictions
from pretrain.monitor.profiler import Profiler
from pretrain.monitor.read_run_folder import is_evaluated, newest_recorded
from pretrain.monitor.slow_rank_watch import SlowRankWatch
from pretrain.monitor.timeline import PipelineTimeline
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.data_watch import DataWatch, wait_for_stores
from pretrain.resilience.guard import Guard
from pretrain.resilience.recompute import Recomputation
from pretrain.resilience.replicas import ReplicaCheck
from pretrain.resilience.requests import Requests
from pretrain.resilience.run_lock import RunLock, sees_lock
from pretrain.resilience.watchdog import RankGuards, Watchdog
from pretrain.step_loop import StepCallbacks, StepLoop
from pretrain.terminal import Screen, clear_status, status


def train(plan: Plan, world: World, callbacks: StepCallbacks, guards: RankGuards,
          weights: InitialWeights | None = None, tasks: Any = None) -> int:
    """Run the plan, resuming from the newest good checkpoint if there is one. Returns the exit code.

    Without a checkpoint, the run begins with `weights`, or with random weights if this is None. `tasks`: result of
    `find_run_tasks` on rank 0.
    """
    resume = _connect(plan, world, guards, weights)
    missing = [] if resume is None else from_rank_0(functools.partial(_missing_evaluations, resume))
    if resume is not None and resume.manifest.step >= resume.plan.last_step and not missing:
        return _report_complete(resume.plan, resume)
    if resume is not None and _early_stopping(resume).is_over and not missing:
        return _report_early_stop(resume, world, guards)
    if resume is not None:
        plan = resume.plan
    loaded = load_run_tasks(plan, tasks)
    if plan.args.sanity_check and (resume is None or resume.manifest.weights_only):
        _check_sanity(plan, world, guards, lambda plan: _build(plan, resume, weights, guards.watchdog).engine)
    start = _build(plan, resume, weights, guards.watchdog)
    plan = plan_as_built(plan, start.engine)
    if callbacks.replay is not None and callbacks.replay.consumed_samples is not None:
        start = replace(start, consumed_samples=callbacks.replay.consumed_samples)
    with Screen(active=world.rank == 0) as screen:
        loop = _begin_loop(plan, world, start, callbacks, guards, screen, loaded)
        if missing:
            step, stopped_by = loop.evaluate_missing(missing, start.step, start.consumed_samples)
        else:
            step, stopped_by = loop.run(start.step, start.consumed_samples)
        loop.close(step, stopped_by)
    dist.barrier()
    if world.local_rank == 0:
        remove_swap_files(plan)
    leave_process_group()
    return STOPPED if step < plan.last_step and stopped_by not in (EARLY_STOP, REPLAYED) else FINISHED


def _check_sanity(plan: Plan, world: World, guards: RankGuards, build: Callable[[Plan], DeepSpeedEngine]) -> None:
    """Run the sanity checks on engines of their own. Raises ConfigError if one fails."""
    def report(activity: str) -> None:
        guards.watchdog.enter("sanity", 0)
        status(f"sanity check: {activity}")

    folder = RunFolder(Path(plan.args.save), active=world.rank == 0, before_write=guards.lock.confirm)
    check_before_start(plan, build, folder, report, active=world.rank == 0)


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


def _build(plan: Plan, resume: Resume | None, weights: InitialWeights | None, watchdog: Watchdog) -> _StartPoint:
    """Build the engine, and load the checkpoint or the initial weights, if any."""
    with deepspeed_output(plan.args.deepspeed_log_level):
        status("building the engine" + (f", loading {resume.folder.name}" if resume else ""))
        watchdog.enter("build", 0)
        kernels, layer_times = (newest_recorded(Path(plan.args.save), key) if dist.get_rank() == 0 else None
                                for key in ("cpu_kernels", "layer_times"))
        engine = build_engine(plan, initialize=resume is None and weights is None,
                              recorded_kernels=kernels, recorded_layer_times=layer_times)
        watchdog.enter("load", 0)
        warnings = _restore(engine, plan, resume, weights)
        step, consumed_samples = _position(plan, resume)
    clear_status()
    return _StartPoint(engine, resume, step, consumed_samples, warnings)


def _begin_loop(plan: Plan, world: World, start: _StartPoint, callbacks: StepCallbacks, guards: RankGuards,
                screen: Screen, tasks: LoadedTasks | None) -> StepLoop:
    """Announce the start, and create the parts of the step loop."""
    engine, resume = start.engine, start.resume
    folder = RunFolder(Path(plan.args.save), active=world.rank == 0, before_write=guards.lock.confirm,
                       warn=screen.line)
    own = attachments(engine)
    own.phase_timers = time_phases(engine)
    measure_waits(own.phase_timers)
    meter = Meter(plan, engine, folder, screen, rank=world.rank, first_step=start.step, phases=own.phase_timers,
                  update_size=measure_updates(engine, functools.partial(owned_weights, engine)),
                  slow_ranks=SlowRankWatch(plan, engine.device, folder, screen, first_step=start.step))
    profiler = Profiler(plan, folder, rank=world.rank, report=screen.line, after_write=meter.restart_timing,
                        before_write=functools.partial(guards.watchdog.enter, "save"))
    timeline = PipelineTimeline(plan, engine, folder, rank=world.rank, report=screen.line)
    saver = Saver(plan, folder, screen)
    requests = Requests(engine.device, folder, guards.launcher, exit_after_minutes=plan.args.exit_after_minutes,
                        committed_step=lambda: saver.committed_step, report=screen.line)
    wait_for_stores(plan, guards.watchdog, screen, rank=world.rank)
    loaders = {name: open_loader(engine, plan, name) for name in plan.datasets}
    # after `Requests`: who waits for the start's event may send a signal, which must then be a request to save
    announce_start(plan, world, screen, folder, first_step=start.step,
                   resumed_from=resume.folder if resume and not resume.manifest.weights_only else None,
                   is_branch=resume is not None and resume.branch is not None,
                   warnings=[*(resume.warnings if resume else ()), *start.warnings], operators=own.operators)
    recorder = begin_record(plan, world, engine, screen, functools.partial(held_states, engine), first_step=start.step,
                            set_path=guards.watchdog.set_record)
    guard = Guard(plan, engine, folder, screen, keep_record=recorder.keep)
    replay = callbacks.replay
    guard_updates(engine, guard.veto if plan.args.spike_policy == "skip" else
                  (lambda loss, norm: engine.global_steps + 1 in replay.vetoed) if replay and replay.vetoed else None)
    data_watch = DataWatch(plan, resume, reject=requests.reject, folder=folder, screen=screen, active=world.rank == 0)
    return StepLoop(plan, engine, loaders, predictions=Predictions(plan, engine, folder),
                    tasks=RunTasks(plan, engine, tasks), meter=meter, recorder=recorder, profiler=profiler,
                    timeline=timeline, saver=saver, requests=requests, data_watch=data_watch, guard=guard,
                    replicas=ReplicaCheck(plan, engine, folder),
                    recomputation=Recomputation(plan, engine, folder, screen), watchdog=guards.watchdog,
                    lock=guards.lock, batch_ramp=BatchRamp(plan.length.batch_sizes, folder, screen),
                    callbacks=callbacks)


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
    args = resume.plan.args
    stopping = EarlyStopping(patience=args.early_stopping_patience, min_delta=args.early_stopping_min_delta)
    if resume.branch is None:
        stopping.set_state(resume.manifest.recipe_states.get("early_stopping"))
    return stopping


def _report_early_stop(resume: Resume, world: World, guards: RankGuards) -> int:
    if world.rank == 0:
        print(early_end_line(resume.plan, resume.manifest.step, _early_stopping(resume).reason()))
    # the supervisor would take an end without this event for a crash
    folder = RunFolder(Path(resume.plan.args.save), active=world.rank == 0, before_write=guards.lock.confirm)
    folder.event("stop", step=resume.manifest.step, reason=EARLY_STOP)
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
    own = attachments(engine)
    own.early_stopping.set_state(_early_stopping(resume).state())
    if resume.branch is not None or resume.other_data or len(plan.overrides) > len(resume.manifest.overrides):
        own.spikes.set_state(None)  # other losses may be usual now
    return warnings


def _position(plan: Plan, resume: Resume | None) -> tuple[int, int]:
    """Return the number of steps done and of samples consumed."""
    if resume is None or resume.manifest.weights_only:
        return 0, plan.args.first_sample
    return resume.manifest.step, from_rank_0(lambda: position_after(resume.folder.parent, resume.manifest))
