"""Layer specs + DeepSpeed JSON -> an engine; one step and one evaluation over either kind of engine.

ZeRO-0/1 run as a PipelineModule of one or more stages, ZeRO-2/3 as the plain module. Only this file branches on it.
"""

import contextlib
import dataclasses
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.optim.lr_scheduler import LambdaLR

from pretrain.config.validate import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.allocator import keep_freed_memory
from pretrain.distributed.collectives import gather
from pretrain.engine.parameter_groups import parameter_groups
from pretrain.errors import ConfigError
from pretrain.model.init import initialize_parameters
from pretrain.model.specs import as_module, as_pipeline, compile_blocks
from pretrain.patches.apply import apply_patches


@contextlib.contextmanager
def deepspeed_output(level: str) -> Iterator[None]:
    """Set DeepSpeed's logger to `level` (debug, info, warning, error); above info, drop what it prints too."""
    deepspeed.utils.logger.setLevel(getattr(logging, level.upper()))
    with contextlib.ExitStack() as stack:
        if level not in ("debug", "info"):
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def emulate_fp16() -> None:
    """Let DeepSpeed run fp16 on a device that says it has none; torch then computes it slowly."""
    type(get_accelerator()).is_fp16_supported = lambda self: True


def _build_module(plan: Plan) -> torch.nn.Module:
    model = dataclasses.replace(plan.model, plain_operators=plan.args.plain_operators)
    if plan.layout.uses_pipeline_module:
        return as_pipeline(model, num_stages=plan.layout.pipeline_stages, seq_length=plan.args.seq_length,
                           partition_method=plan.layout.partition_method,
                           activation_checkpoint_interval=plan.layout.activation_checkpoint_interval)
    with deepspeed.zero.Init(config_dict_or_path=plan.ds_config, enabled=plan.layout.zero_stage == 3):
        return as_module(model, activation_checkpoint_interval=plan.layout.activation_checkpoint_interval)


def _scheduler(plan: Plan) -> Callable[[torch.optim.Optimizer], LambdaLR] | None:
    """The plan's schedule as DeepSpeed takes it; None: the JSON's own scheduler, or none."""
    schedule = plan.schedule
    if schedule is None:
        return None
    return lambda optimizer: LambdaLR(optimizer, lambda step: schedule(step) / schedule.peak)


def build_engine(plan: Plan) -> DeepSpeedEngine:
    """The engine, with initial weights that depend on (seed, parameter name) alone. The process group must exist."""
    if plan.args.emulate_fp16:
        emulate_fp16()
    torch.backends.cuda.matmul.allow_tf32 = plan.args.tf32
    module = _build_module(plan)
    initialize_parameters(module, plan.model, seed=plan.args.seed)
    # Every rank its own dropout; plain DeepSpeed starts each pipeline stage from the same state.
    torch.manual_seed(plan.args.seed + 1 + torch.distributed.get_rank())
    groups = parameter_groups(module.parameters())
    _check_groups(groups)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=plan.ds_config,
                                      lr_scheduler=_scheduler(plan))
    apply_patches(engine)
    if engine.device.type == "cpu":
        keep_freed_memory()  # not before: what building needed for a while goes back to the system
    if plan.args.compile_blocks:
        compile_blocks(engine.module, seq_length=plan.args.seq_length, device=engine.device)
    return engine


def _check_groups(groups: list[dict[str, Any]]) -> None:
    """DeepSpeed takes the gradient norm group by group, with one reduction each, and leaves out empty groups: stages
    that differ in them would wait for one another without end. Raises ConfigError, on every rank.
    """
    held = gather([bool(group["params"]) for group in groups])
    if any(groups_of_rank != held[0] for groups_of_rank in held):
        raise ConfigError("pipeline.partition_method", found="a stage without a block", expected="blocks on each stage",
                          remedy='"partition_method": "uniform", or fewer "stages"')


def remove_swap_files(plan: Plan) -> None:
    """Remove what NVMe offload left on this host; a checkpoint holds all of it."""
    for block in ("offload_optimizer", "offload_param"):
        path = (plan.ds_config.get("zero_optimization", {}).get(block) or {}).get("nvme_path")
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)


def train_batch(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """One optimizer step over this rank's micro-batches: forward, backward, reduction, clipping, update, schedule.

    Returns:
        The loss of the global batch per unmasked token, before the update: a scalar on the device, on every rank.
    """
    if isinstance(engine, PipelineEngine):
        return engine.train_batch(iter(micro_batches)).reshape(())
    engine.train()
    total = torch.zeros((), device=engine.device)
    for batch in micro_batches:
        tokens_BT, (labels_BT, weights_BT) = _to_device(engine, batch)
        loss = engine(tokens_BT, labels_BT, weights_BT)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    return _mean_over_data_parallel(engine, total / len(micro_batches))


@torch.no_grad()
def eval_batch(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """The loss of a global batch per unmasked token, without dropout: a scalar on the device, on every rank."""
    if isinstance(engine, PipelineEngine):
        return engine.eval_batch(iter(micro_batches), num_micro_batches=len(micro_batches)).reshape(())
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for batch in micro_batches:
        tokens_BT, (labels_BT, weights_BT) = _to_device(engine, batch)
        total += engine(tokens_BT, labels_BT, weights_BT)
    return _mean_over_data_parallel(engine, total / len(micro_batches))


def _to_device(engine: DeepSpeedEngine, batch: MicroBatch) -> MicroBatch:
    tokens_BT, (labels_BT, weights_BT) = batch
    move: dict[str, Any] = {"device": engine.device, "non_blocking": True}
    return tokens_BT.to(**move), (labels_BT.to(**move), weights_BT.to(**move))


def _mean_over_data_parallel(engine: DeepSpeedEngine, value: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(value, group=engine.data_parallel_group)
    return value / data_parallel_size(engine)


def sum_over_data_parallel(engine: DeepSpeedEngine, value: float) -> float:
    """The sum of a host number over the ranks that hold other samples of the same step; synchronises the device."""
    total = torch.tensor(value, dtype=torch.float64, device=engine.device)
    torch.distributed.all_reduce(total, group=engine.data_parallel_group)
    return float(total)


def data_parallel_rank(engine: DeepSpeedEngine) -> int:
    return torch.distributed.get_rank(engine.data_parallel_group)


def data_parallel_size(engine: DeepSpeedEngine) -> int:
    return torch.distributed.get_world_size(engine.data_parallel_group)


def grad_norm(engine: DeepSpeedEngine) -> float:
    """Global norm of the last step's gradients before clipping, unscaled; NaN before the first step."""
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)


def loss_scale(engine: DeepSpeedEngine) -> float:
    """fp16's current loss scale; 1 in other precisions."""
    if not engine.fp16_enabled():
        return 1.0
    scale = engine._get_optimizer_loss_scale()
    return float(scale if scale is not None else engine.optimizer.loss_scale)


def learning_rate(engine: DeepSpeedEngine) -> float:
    """That of the next step."""
    return float(engine.get_lr()[0])


def loss_scale_state(engine: DeepSpeedEngine) -> dict[str, float] | None:
    """fp16's loss scale and the counters of its window, by DeepSpeed's names; None in other precisions."""
    if not engine.fp16_enabled():
        return None
    scaler = getattr(engine.optimizer, "loss_scale_config", None) or engine.optimizer.loss_scaler
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {name: float(getattr(scaler, name)) for name in names if getattr(scaler, name, None) is not None}
