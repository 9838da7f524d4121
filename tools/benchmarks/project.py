"""This project as a baseline. Each function with a `job` is the main function of a process."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from pretrain import step_loop, trainer
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.load.agree_on_checkpoint import find_damage_together
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.commit import next_checkpoint_bytes
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.plan import Plan
from pretrain.data.loader import Loader, MicroBatch
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import DeepSpeedEngine, build_engine, deepspeed_output
from pretrain.engine.steps import open_loader, train_batch
from pretrain.monitor.read_run_folder import read_events
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from pretrain.terminal import Screen
from tools.benchmarks.processes import SAVE_INTERVAL_S, BaselineJob
from tools.benchmarks.profile import named_optimizer_step, operator_times
from tools.benchmarks.worker import RequestLoop

_COMMIT_TIMEOUT_S = 600  # limit for the commit of a save


def _build(job: BaselineJob, requests: RequestLoop) -> tuple[Plan, DeepSpeedEngine, Loader]:
    """Build the engine and the loader of the training data, and report it."""
    with deepspeed_output("error"):
        init_process_group(running_environment())
        plan = job.plan()
        engine = build_engine(plan)
    loader = open_loader(engine, plan, "train")
    requests.report_build(engine.module)
    return plan, engine, loader


def project(job: BaselineJob, requests: RequestLoop) -> None:
    """Train with the two functions that the step loop calls in a step: Loader.step and train_batch."""
    plan, engine, loader = _build(job, requests)
    for consumed_samples in itertools.count(0, plan.layout.global_batch_size):
        requests.after_step(train_batch(engine, loader.step(consumed_samples)))


def profile(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Profile the steps of `project`, one in each repetition."""
    plan, engine, loader = _build(job, requests)
    engine.optimizer.step = named_optimizer_step(engine.optimizer.step)
    samples = itertools.count(0, plan.layout.global_batch_size)
    while True:
        requests.end_repetition(operators=operator_times(
            lambda: train_batch(engine, loader.step(next(samples))), vocab_size=plan.model.vocab_size,
            cuda=job.device_kind == "cuda"))


def bare_engine(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Call the engine directly, always with the micro-batches of the first step."""
    _, engine, loader = _build(job, requests)
    micro_batches = loader.step(0)
    loader.close()
    while True:
        requests.after_step(engine.train_batch(iter(micro_batches)))


def loop(job: BaselineJob, requests: RequestLoop) -> None:
    """Run `train` of pretrain/trainer.py with all guards, with a train_batch that waits for a request before each step.
    """
    world, plan = running_environment(), job.plan()
    losses: list[torch.Tensor] = []

    def train_batch_on_request(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
        if losses:
            requests.after_step(losses.pop())  # the time includes everything that the loop does between two steps
        else:
            requests.report_build(engine.module)
        losses.append(train_batch(engine, micro_batches))
        return losses[0]

    step_loop.train_batch = train_batch_on_request
    with rank_guards(Path(plan.args.save), world, TimeOuts.from_flags(plan.args), LauncherWatch(world)) as guards:
        trainer.train(plan, world, [], guards)


def checkpoint(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Save and load checkpoints, and write and read a file of the same size on the same disk.

    Before each save, the request's number of steps without a save is timed.
    """
    plan, engine, loader = _build(job, requests)
    savers = {label: _Saves(plan, engine, is_async=label == "--async_save")
              for label in ("synchronous save", "--async_save")}

    def train_step() -> tuple[int, float]:
        start = time.perf_counter()
        train_batch(engine, loader.step(engine.global_steps * plan.layout.global_batch_size))
        requests.synchronize()
        return engine.global_steps, time.perf_counter() - start

    while True:
        figures: dict[str, dict[str, float]] = {}
        for label, saves in savers.items():
            write, read = _disk_rates(saves.folder, next_checkpoint_bytes(plan, saves.checkpoints))
            timed = [train_step() for _ in range(requests.request["steps"])]
            figures[label] = saves.save(timed[-1][0], statistics.median(seconds for _, seconds in timed), train_step,
                                        requests.synchronize)
            figures[label]["of_disk"] = figures[label]["bytes_per_s"] / write
        num_bytes, (folder,) = figures[label]["checkpoint_bytes"], saves.checkpoints.glob("global_step*")
        for name, seconds in _load(engine, plan, folder).items():
            figures[name] = {"bytes_per_s": num_bytes / seconds, "of_disk": num_bytes / seconds / read}
        requests.end_repetition(figures={**figures, "disk": {"write": write, "read": read}})


def _disk_rates(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Return the bytes per second of writing a temporary file with a sync, and of reading it from the disk."""
    piece = os.urandom(2**20)  # some disks do not write zeros
    count = max(num_bytes // len(piece), 1)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(piece)
        os.fsync(file.fileno())
        write = count * len(piece) / (time.perf_counter() - start)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(len(piece)):
            pass
    return write, count * len(piece) / (time.perf_counter() - start)


class _Saves:
    """Saves checkpoints into a run folder of its own, and removes the one before."""

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, *, is_async: bool) -> None:
        self.folder = Path(f"{plan.args.save}-{is_async}")
        self.checkpoints = self.folder / "checkpoints"
        plan = dataclasses.replace(plan, args=dataclasses.replace(plan.args, async_save=is_async))
        self._engine = engine
        self._saver = Saver(plan, RunFolder(self.folder, active=True), Screen(active=False))

    def save(self, step: int, usual_s: float, train_step: Callable[[], tuple[int, float]],
             synchronize: Callable[[], None]) -> dict[str, float]:
        """Save, and train until the checkpoint is committed.

        Returns the time for which training stopped, the additional time of the steps during the save, and the size of
        the checkpoint with the rate at which it was written.
        """
        for old in self.checkpoints.glob("global_step*"):
            shutil.rmtree(old)
        start = time.perf_counter()
        self._saver.save(self._engine, step=step, consumed_samples=0, eval_loss=None, wait=False)
        synchronize()
        blocking_s = time.perf_counter() - start
        during_save_s = []
        while (written := self._written(step)) is None:
            if time.perf_counter() - start > _COMMIT_TIMEOUT_S:
                raise TimeoutError(f"step {step} was not committed within {_COMMIT_TIMEOUT_S} s")
            during_save_s.append(train_step()[1])
        slowdown_s = sum(during_save_s) - usual_s * len(during_save_s)
        return {"blocking_s": blocking_s, "slowdown_s": slowdown_s, "checkpoint_bytes": written["bytes"],
                "bytes_per_s": written["bytes"] / written["seconds"],
                "total_share": (blocking_s + max(slowdown_s, 0)) / SAVE_INTERVAL_S}

    def _written(self, step: int) -> dict[str, Any] | None:
        """Return the event of the finished save of `step`; None before its end."""
        self._saver.poll()
        return next((row for row in read_events(self.folder) if (row["event"], row["step"]) == ("save", step)), None)


def _load(engine: DeepSpeedEngine, plan: Plan, folder: Path) -> dict[str, float]:
    """Verify and load a checkpoint whose files are not in the page cache, as a start after a reboot does.

    Returns the seconds of both, and their sum.
    """
    manifest = read_manifest(folder)
    for name in manifest.files:
        evict(folder / name)
    start = time.perf_counter()
    damage = find_damage_together(folder, manifest)
    verified = time.perf_counter()
    if damage:
        raise ValueError(damage[0])
    with deepspeed_output("error"):
        load_checkpoint(engine, plan, folder, manifest)
    end = time.perf_counter()
    return {"verification": verified - start, "load": end - verified, "verification and load": end - start}


def evict(path: Path) -> None:
    """Remove a synced file from the page cache, so that the next read comes from the disk."""
    with open(path, "rb") as file, contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
