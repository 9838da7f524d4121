"""This project's engine and step loop as baselines.

Each public function with the parameter `job` is the main function of a process, and never returns.
"""

import itertools
from pathlib import Path
from typing import Any, NoReturn

import torch

from pretrain import step_loop, trainer
from pretrain.bench.baselines.measurement_time import MeasurementTime
from pretrain.bench.baselines.operator_times import named_optimizer_step, operator_times
from pretrain.bench.processes.baseline_job import BaselineJob
from pretrain.bench.processes.request_loop import RequestLoop
from pretrain.config.validate import Plan
from pretrain.data.loader import Loader, MicroBatch
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import running_environment
from pretrain.engine.build import DeepSpeedEngine, build_engine, deepspeed_output
from pretrain.engine.steps import data_parallel_rank, data_parallel_size, train_batch
from pretrain.memory.memory_watch import MemoryWatch
from pretrain.model.flops import layer_flops_per_token
from pretrain.model.layers.block import Block
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.rank_guards import rank_guards
from pretrain.resilience.watchdog import NO_LIMITS


def _init_process_group() -> None:
    with deepspeed_output("error"):
        init_process_group(running_environment())


def _engine(plan: Plan) -> DeepSpeedEngine:
    with deepspeed_output("error"):
        return build_engine(plan)


def training_loader(plan: Plan, *, rank: int = 0, ranks: int = 1) -> Loader:
    """Return a loader of the training data, like the step loop's."""
    return Loader(plan.datasets["train"], micro_batch_size=plan.layout.micro_batch_size,
                  gradient_accumulation_steps=plan.layout.gradient_accumulation_steps, data_parallel_rank=rank,
                  data_parallel_size=ranks, pin_memory=torch.cuda.is_available())


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
    _init_process_group()
    plan = job.plan()
    engine = _engine(plan)
    loader = training_loader(plan, rank=data_parallel_rank(engine), ranks=data_parallel_size(engine))
    requests.report_build(**_facts(engine, plan))
    consumed_samples = 0
    while True:
        loss = train_batch(engine, loader.step(consumed_samples))
        consumed_samples += plan.layout.global_batch_size
        requests.after_step(loss)


def bare_engine(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Call the engine directly, always with the micro-batches of the first step."""
    _init_process_group()
    plan = job.plan()
    engine = _engine(plan)
    loader = training_loader(plan)
    micro_batches = loader.step(0)
    loader.close()
    requests.report_build(**_facts(engine, plan))
    while True:
        requests.after_step(engine.train_batch(iter(micro_batches)))


def loop(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Run `train` of pretrain/trainer.py, with a train_batch that waits for a request before each step."""
    world, plan, measurements = running_environment(), job.plan(), MeasurementTime()
    losses: list[torch.Tensor] = []

    def train_batch_on_request(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
        if losses:
            # the time includes everything that the loop does between two steps
            requests.after_step(losses.pop(), figures=measurements.take)
        else:
            requests.report_build(**_facts(engine, plan))
        losses.append(train_batch(engine, micro_batches))
        return losses[0]

    step_loop.train_batch = train_batch_on_request
    watch = MemoryWatch.start(plan, world)
    with rank_guards(Path(plan.args.save), world, NO_LIMITS, LauncherWatch(world)) as guards:
        trainer.train(plan, world, step_loop.StepCallbacks(watch.before_step, watch.after_step), guards)
    requests.end()


def profile(job: BaselineJob, requests: RequestLoop) -> NoReturn:
    """Profile the steps of `project`."""
    _init_process_group()
    plan = job.plan()
    engine = _engine(plan)
    engine.optimizer.step = named_optimizer_step(engine.optimizer.step)
    loader = training_loader(plan)
    requests.report_build(**_facts(engine, plan))
    samples = itertools.count(0, plan.layout.global_batch_size)
    while True:
        requests.end_repetition(operators=operator_times(
            lambda: train_batch(engine, loader.step(next(samples))), steps=requests.request["steps"],
            vocab_size=plan.model.vocab_size, cuda=job.device_kind == "cuda"))
