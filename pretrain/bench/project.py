"""This project as a baseline. Each function with a `job` is the main function of a process, and never returns."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from pretrain import step_loop, trainer
from pretrain.bench.processes import BaselineJob
from pretrain.bench.profile import named_optimizer_step, operator_times
from pretrain.bench.worker import RequestLoop
from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.agree_on_checkpoint import find_damage_together
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.commit import next_checkpoint_bytes
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.validate import Plan
from pretrain.data.loader import Loader, MicroBatch
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import DeepSpeedEngine, build_engine, deepspeed_output
from pretrain.engine.steps import data_parallel_rank, data_parallel_size, train_batch
from pretrain.memory.memory_watch import MemoryWatch
from pretrain.model.flops import layer_flops_per_token
from pretrain.model.layers.block import Block
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.watchdog import TimeOuts, rank_guards
from pretrain.terminal import Screen

_COMMIT_TIMEOUT_S = 600  # limit for the commit of a save
_BLOCK_BYTES = 2**24  # of one write or read of the disk's rate, like `dd bs=16M`


def training_loader(plan: Plan, *, rank: int = 0, ranks: int = 1) -> Loader:
    """Return a loader of the training data, like the step loop's."""
    return Loader(plan.datasets["train"], micro_batch_size=plan.layout.micro_batch_size,
                  gradient_accumulation_steps=plan.layout.gradient_accumulation_steps, data_parallel_rank=rank,
                  data_parallel_size=ranks, pin_memory=torch.cuda.is_available())


def _build(job: BaselineJob) -> tuple[Plan, DeepSpeedEngine, Loader]:
    with deepspeed_output("error"):
        init_process_group(running_environment())
        plan = job.plan()
        engine = build_engine(plan)
    return plan, engine, training_loader(plan, rank=data_parallel_rank(engine), ranks=data_parallel_size(engine))


def _facts(engine: DeepSpeedEngine, plan: Plan) -> dict[str, Any]:
    """Return this rank's number of parameters, and the FLOPs per token of its pipeline stage (model/flops.py)."""
    blocks = plan.model.blocks()
    layers = [blocks[module.index] for module in engine.module.modules() if isinstance(module, Block)]
    if plan.layout.pipeline_stages == 1 or engine.is_last_stage():
        layers.append(plan.model.layers()[-1])
    flops = float(sum(layer_flops_per_token(plan.model, layer, plan.args.seq_length) for layer in layers))
    return {"parameters": sum(weight.numel() for weight in engine.module.parameters()), "stage_flops": flops}


def project(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Train with the two functions that the step loop calls in a step: Loader.step and train_batch."""
    plan, engine, loader = _build(job)
    requests.report_build(**_facts(engine, plan))
    for consumed_samples in itertools.count(0, plan.layout.global_batch_size):
        requests.after_step(train_batch(engine, loader.step(consumed_samples)))
    requests.end()


def bare_engine(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Call the engine directly, always with the micro-batches of the first step."""
    plan, engine, loader = _build(job)
    micro_batches = loader.step(0)
    loader.close()
    requests.report_build(**_facts(engine, plan))
    while True:
        requests.after_step(engine.train_batch(iter(micro_batches)))


def loop(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Run `train` of pretrain/trainer.py with all guards, with a train_batch that waits for a request before each step.
    """
    world, plan = running_environment(), job.plan()
    losses: list[torch.Tensor] = []

    def train_batch_on_request(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
        if losses:
            requests.after_step(losses.pop())  # the time includes everything that the loop does between two steps
        else:
            requests.report_build(**_facts(engine, plan))
        losses.append(train_batch(engine, micro_batches))
        return losses[0]

    step_loop.train_batch = train_batch_on_request
    watch = MemoryWatch.start(plan, world)
    with rank_guards(Path(plan.args.save), world, TimeOuts.from_flags(plan.args), LauncherWatch(world)) as guards:
        trainer.train(plan, world, step_loop.StepCallbacks(watch.before_step, watch.after_step), guards)
    requests.end()


def profile(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Profile the steps of `project`, one in each repetition."""
    plan, engine, loader = _build(job)
    engine.optimizer.step = named_optimizer_step(engine.optimizer.step)
    requests.report_build(**_facts(engine, plan))
    samples = itertools.count(0, plan.layout.global_batch_size)
    while True:
        requests.end_repetition(operators=operator_times(
            lambda: train_batch(engine, loader.step(next(samples))), vocab_size=plan.model.vocab_size,
            cuda=job.device_kind == "cuda"))


def checkpoint(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Save and load checkpoints, and write and read a file of the same size on the same disk.

    Before each save, the request's number of steps without a save is timed.
    """
    plan, engine, loader = _build(job)
    savers = {kind: _Saves(plan, engine, is_async=kind == "async_save") for kind in ("save", "async_save")}
    steps = itertools.count(1)

    def train_step() -> tuple[int, float]:
        step, start = next(steps), time.perf_counter()
        train_batch(engine, loader.step(step * plan.layout.global_batch_size))
        requests.synchronize()
        return step, time.perf_counter() - start

    requests.report_build(**_facts(engine, plan))
    while True:
        figures: dict[str, Any] = {}
        for kind, saves in savers.items():
            disk = measure_disk(saves.folder, next_checkpoint_bytes(plan, saves.checkpoints))
            timed = [train_step() for _ in range(requests.request["steps"])]
            usual_s = statistics.median(seconds for _, seconds in timed)
            figures[kind] = disk | saves.save(timed[-1][0], usual_s, train_step, requests.synchronize)
            if kind == "save":
                figures[kind] |= _load(engine, plan, saves.checkpoints / f"global_step{timed[-1][0]}")
        requests.end_repetition(**figures)


class _Saves:
    """Saves checkpoints into a run folder of its own, and removes the one before."""

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, *, is_async: bool) -> None:
        self.folder = Path(f"{plan.args.save}-{is_async}")
        self.checkpoints = self.folder / "checkpoints"
        plan = dataclasses.replace(plan, args=dataclasses.replace(plan.args, async_save=is_async))
        self._engine = engine
        self._saver = Saver(plan, RunFolder(self.folder, active=True), Screen(active=False))

    def save(self, step: int, usual_s: float, train_step: Callable[[], tuple[int, float]],
             synchronize: Callable[[], None]) -> dict[str, Any]:
        """Save, and train until the checkpoint is committed.

        Returns the time for which training stopped, the additional time of the steps during the save, and the size of
        the checkpoint with the time in which it was written.
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
        return {"blocking_s": blocking_s, "slowdown_s": sum(during_save_s) - usual_s * len(during_save_s),
                "checkpoint_bytes": written["bytes"], "write_s": written["seconds"]}

    def _written(self, step: int) -> dict[str, Any] | None:
        """Return the event of the finished save of `step`; None before its end."""
        self._saver.poll()
        rows = (json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines())
        return next((row for row in rows if row["event"] == "save" and row["step"] == step), None)


def _load(engine: DeepSpeedEngine, plan: Plan, folder: Path) -> dict[str, Any]:
    """Verify and load a checkpoint whose files are not in the page cache, as a start after a reboot does."""
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
    return {"verify_s": verified - start, "load_s": time.perf_counter() - verified,
            "resume_s": time.perf_counter() - start}


def measure_disk(folder: Path, num_bytes: int) -> dict[str, float]:
    """Return the rates, in bytes per second, of writing one file with fsync, and of reading it from the disk.

    This is `dd bs=16M conv=fsync`, and `dd bs=16M` of a file that is not in the page cache. The bytes are random,
    because some disks do not write zeros.
    """
    num_blocks, path = max(num_bytes // _BLOCK_BYTES, 1), folder / "disk.bin"
    block = bytearray(os.urandom(_BLOCK_BYTES))
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(num_blocks):
            file.write(block)
        os.fsync(file.fileno())
    write_s = time.perf_counter() - start
    evict(path)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    read_s = time.perf_counter() - start
    path.unlink()
    return {"disk_write": num_blocks * _BLOCK_BYTES / write_s, "disk_read": num_blocks * _BLOCK_BYTES / read_s}


def evict(path: Path) -> None:
    """Remove a synced file from the page cache, so that the next read comes from the disk."""
    with open(path, "rb") as file, contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
