"""This project as a contender: its engine, its loop, its checkpoints. A child's main each, which never returns."""

import dataclasses
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from pretrain import trainer as training_loop
from pretrain.bench.processes.baseline_job import Job
from pretrain.bench.processes.request_loop import Rounds
from pretrain.checkpoint.save.saver import Saver
from pretrain.config.validate import Plan
from pretrain.console.screen import Screen
from pretrain.data.loader import Loader, MicroBatch
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World, running_environment
from pretrain.engine.build import (
    DeepSpeedEngine,
    build_engine,
    data_parallel_rank,
    data_parallel_size,
    deepspeed_output,
    train_batch,
)
from pretrain.memory.report.memory_watch import MemoryWatch
from pretrain.model.flops import block_flops_per_token, head_flops_per_token
from pretrain.model.layers import Block
from pretrain.monitor.run_folder import RunFolder

_MORE_SAVES_S = 600  # for a background save to be committed


def _world() -> World:
    world = running_environment()
    with deepspeed_output("error"):
        init_process_group(world)
    return world


def _engine(plan: Plan) -> DeepSpeedEngine:
    with deepspeed_output("error"):
        return build_engine(plan)


def loader_of(plan: Plan, *, rank: int = 0, ranks: int = 1) -> Loader:
    """The run's training data, as the loop reads it."""
    return Loader(plan.datasets["train"], micro_batch_size=plan.layout.micro_batch_size,
                  gradient_accumulation_steps=plan.layout.gradient_accumulation_steps, data_parallel_rank=rank,
                  data_parallel_size=ranks, pin_memory=torch.cuda.is_available())


def _facts(engine: DeepSpeedEngine, plan: Plan) -> dict[str, Any]:
    """How many parameters this rank has, and how much of the work: FLOPs a token, forward and backward, as flops.py."""
    blocks = sum(isinstance(module, Block) for module in engine.module.modules())
    flops = blocks * block_flops_per_token(plan.model, plan.args.seq_length)
    if plan.layout.pipeline_stages == 1 or engine.is_last_stage():
        flops += head_flops_per_token(plan.model)
    return {"parameters": sum(weight.numel() for weight in engine.module.parameters()), "stage_flops": flops}


def project(job: Job, rounds: Rounds) -> NoReturn:
    """build_engine, Loader, train_batch: what the step loop calls."""
    _world()
    plan = job.plan()
    engine = _engine(plan)
    loader = loader_of(plan, rank=data_parallel_rank(engine), ranks=data_parallel_size(engine))
    rounds.built(**_facts(engine, plan))
    consumed_samples = 0
    while True:
        loss = train_batch(engine, loader.step(consumed_samples))
        consumed_samples += plan.layout.global_batch_size
        rounds.after_step(loss)


def bare_engine(job: Job, rounds: Rounds) -> NoReturn:
    """The same engine in the shortest loop there is: DeepSpeed's own call, the same batches over and over."""
    _world()
    plan = job.plan()
    engine = _engine(plan)
    loader = loader_of(plan)
    micro_batches = loader.step(0)
    loader.close()
    rounds.built(**_facts(engine, plan))
    while True:
        rounds.after_step(engine.train_batch(iter(micro_batches)))


def loop(job: Job, rounds: Rounds) -> NoReturn:
    """pretrain/trainer.py's `train` itself, with its log, data and signals; stopped before each step's train_batch."""
    world, plan = running_environment(), job.plan()
    losses: list[torch.Tensor] = []

    def watched(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
        if losses:
            rounds.after_step(losses.pop())  # all that the loop did after the step before is in its time
        else:
            rounds.built(**_facts(engine, plan))
        losses.append(train_batch(engine, micro_batches))
        return losses[0]

    training_loop.train_batch = watched
    training_loop.train(plan, world, MemoryWatch.start(plan, world))
    rounds.end()


def checkpoint(job: Job, rounds: Rounds) -> NoReturn:
    """Rounds of one save: {"async": whether in the background, "steps": to know a step's time}."""
    _world()
    plan = job.plan()
    engine = _engine(plan)
    loader = loader_of(plan)
    folders = {kind: RunFolder(Path(f"{plan.args.save}-{kind}"), active=True) for kind in (False, True)}
    savers = {kind: Saver(dataclasses.replace(plan, args=dataclasses.replace(plan.args, async_save=kind)), folder,
                           Screen(active=False)) for kind, folder in folders.items()}
    step = 0

    def one_step() -> float:
        nonlocal step
        start = time.perf_counter()
        train_batch(engine, loader.step(step * plan.layout.global_batch_size))
        rounds.synchronize()
        step += 1
        return time.perf_counter() - start

    rounds.built(**_facts(engine, plan))
    while True:
        kind = rounds.request["async"]
        checkpoints = folders[kind].path / "checkpoints"
        usual_s = statistics.median(one_step() for _ in range(rounds.request["steps"]))
        saved, start = f"global_step{step}", time.perf_counter()
        savers[kind].save(engine, step=step, consumed_samples=0, eval_loss=None, last=False)
        rounds.synchronize()
        blocking_s = time.perf_counter() - start
        behind_s = []
        while not _committed(checkpoints, saved, start):
            behind_s.append(one_step())
        size = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())
        shutil.rmtree(checkpoints / saved)
        rounds.end_round(step_s=usual_s, blocking_s=blocking_s, checkpoint_bytes=size,
                         slowdown_s=sum(behind_s) - usual_s * len(behind_s), steps_behind=len(behind_s))


def _committed(checkpoints: Path, name: str, start: float) -> bool:
    if time.perf_counter() - start > _MORE_SAVES_S:
        raise TimeoutError(f"{name} was not committed in {_MORE_SAVES_S} s")
    latest = checkpoints / "latest"
    return latest.is_file() and latest.read_text().strip() == name
