"""Saving and loading of checkpoints, next to plain writing and reading of as many bytes on the same disk."""

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from pretrain.bench.baselines.this_project import training_loader
from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.request_loop import RequestLoop
from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.load.agree import find_damage_together
from pretrain.checkpoint.load.load_checkpoint import load_checkpoint
from pretrain.checkpoint.save.saver import Saver
from pretrain.checkpoint.save.space import next_checkpoint_bytes
from pretrain.config.validate import Plan
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import DeepSpeedEngine, build_engine, deepspeed_output
from pretrain.engine.steps import train_batch
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal.screen import Screen

_COMMIT_TIMEOUT_S = 600  # limit for the commit of a save
_BLOCK_BYTES = 2**24  # of one write or read of the disk's baseline, like `dd bs=16M`

TrainStep = Callable[[], float]  # trains one step, and returns its seconds


def checkpoint(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Answer each request with the figures of its "kind".

    "disk": write and read a file without any processing. "save" and "async_save": save one checkpoint; "steps" is the
    number of steps without a save that are timed before it. "load": verify and load the checkpoint of the last "save".
    """
    with deepspeed_output("error"):
        init_process_group(running_environment())
        plan = job.plan()
        engine = build_engine(plan)
    savers = {is_async: _Saves(plan, engine, is_async=is_async) for is_async in (False, True)}
    loader, step = training_loader(plan), 0

    def train_step() -> float:
        nonlocal step
        start = time.perf_counter()
        train_batch(engine, loader.step(step * plan.layout.global_batch_size))
        requests.synchronize()
        step += 1
        return time.perf_counter() - start

    requests.report_build(sum(weight.numel() for weight in engine.module.parameters()))
    while True:
        kind = requests.request["kind"]
        if kind == "disk":
            figures = measure_disk(savers[False].folder, next_checkpoint_bytes(plan, savers[False].checkpoints))
        elif kind == "load":
            figures = _load(engine, plan, savers[False].checkpoints / f"global_step{step}")
        else:
            usual_s = statistics.median(train_step() for _ in range(requests.request["steps"]))
            figures = savers[kind == "async_save"].save(step, usual_s, train_step, requests.synchronize)
        requests.end_repetition(**figures)


class _Saves:
    """Saves checkpoints into a run folder of its own, and removes the one before."""

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, *, is_async: bool) -> None:
        self.folder = Path(f"{plan.args.save}-{is_async}")
        self.checkpoints = self.folder / "checkpoints"
        plan = dataclasses.replace(plan, args=dataclasses.replace(plan.args, async_save=is_async))
        self._engine = engine
        self._saver = Saver(plan, RunFolder(self.folder, active=True), Screen(active=False))

    def save(self, step: int, usual_s: float, train_step: TrainStep, synchronize: Callable[[], None]) -> dict[str, Any]:
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
            during_save_s.append(train_step())
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


def measure_disk(folder: Path, num_bytes: int) -> dict[str, Any]:
    """Return the rates, in bytes per second, of writing one file with fsync, and of reading it from the disk.

    This is `dd bs=16M conv=fsync`, and `dd bs=16M` of a file that is not in the page cache. The bytes are random,
    because some disks do not write zeros.
    """
    num_blocks = max(num_bytes // _BLOCK_BYTES, 1)
    block, path = memoryview(bytearray(os.urandom(_BLOCK_BYTES))), folder / "disk.bin"
    with _file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        start = time.perf_counter()
        for _ in range(num_blocks):
            os.write(descriptor, block)
        os.fsync(descriptor)
        write_s = time.perf_counter() - start
    evict(path)
    with _file(path, os.O_RDONLY) as descriptor:
        start = time.perf_counter()
        while os.readv(descriptor, [block]):
            pass
        read_s = time.perf_counter() - start
    path.unlink()
    return {"write_bytes_per_s": num_blocks * _BLOCK_BYTES / write_s,
            "read_bytes_per_s": num_blocks * _BLOCK_BYTES / read_s}


def evict(path: Path) -> None:
    """Remove a synced file from the page cache, so that the next read comes from the disk."""
    with _file(path, os.O_RDONLY) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _file(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
