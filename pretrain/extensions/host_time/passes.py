"""Save host time per step, which small models feel: passes over all parameters in Python, and sums over one rank.

DeepSpeed 0.19.8 makes them in each step, at any size of the model. None of these functions changes a value. Guarded by
tests/extensions/host_time/test_updates.py, which compares the steps with those of DeepSpeed bit by bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.comm import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.distributed.requirements import shortcut
from pretrain.engine.attachments import attachments
from pretrain.extensions.host_time.reads import read_less
from pretrain.extensions.host_time.waits import wait_on_device


def patch_engine(engine: DeepSpeedEngine) -> None:
    """Apply the functions of this folder that fit the engine."""
    save_host_time(engine)
    update = attachments(engine).update
    with shortcut("fewer reads from the device"):
        read_less(engine, update)
    wait_on_device(engine, update)


def save_host_time(engine: DeepSpeedEngine) -> None:
    """Apply the functions of this file that fit the engine."""
    with shortcut("sums over one rank"):
        _skip_sums_over_one_rank()
    for save in (_keep_mode, _clear_known_gradients, _keep_places, _skip_reduction_at_stage_0, _add_gradients_at_once):
        with shortcut("host time per step"):
            save(engine)


def _skip_sums_over_one_rank() -> None:
    """Skip the all-reduces of DeepSpeed whose group has one rank.

    DeepSpeed 0.19.8 makes them for norms and flags (runtime/utils.py, runtime/zero/stage_1_and_2.py, stage3.py). gloo
    hands each one to another thread, which takes half a millisecond; NCCL launches a kernel. There is one backend for
    all engines of a process.
    """
    backend: Any = comm.cdb
    if "all_reduce" in vars(backend):
        return
    reduce = backend.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = comm.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if async_op or dist.get_world_size(group) > 1:
            return reduce(tensor, op, group, async_op)
        return None

    backend.all_reduce = all_reduce


def _keep_mode(engine: DeepSpeedEngine) -> None:
    """Set the mode of all modules only if it changes: `train` visits each of them in every step (pipe/engine.py)."""
    module = engine.module
    if not isinstance(module, torch.nn.Module):
        return
    set_mode = module.train

    def train(mode: bool = True) -> torch.nn.Module:
        return module if module.training == mode else set_mode(mode)

    setattr(module, "train", train)  # noqa: B010  mypy: a method


def _clear_known_gradients(engine: DeepSpeedEngine) -> None:
    """Let `zero_grad` (runtime/engine.py) walk over a list of the parameters instead of all modules."""
    if engine.zero_optimization():
        return
    parameters = [*engine.module.parameters()]

    def zero_grad() -> None:
        for parameter in parameters:
            parameter.grad = None

    engine.zero_grad = zero_grad


def _keep_places(engine: DeepSpeedEngine) -> None:
    """Let ZeRO-1 and ZeRO-2 place the parameters in their flat buffer only if one of them is elsewhere.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, step) makes them views of it after each update, "just to be safe".
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    place = optimizer._update_model_bit16_weights
    placed: dict[int, list[int]] = {}  # addresses of a group's buffer and parameters

    def update_model_bit16_weights(group: int) -> None:
        def addresses() -> list[int]:
            return [x.data_ptr() for x in (optimizer.bit16_groups_flat[group], *optimizer.bit16_groups[group])]

        if placed.get(group) != addresses():
            place(group)
            placed[group] = addresses()

    optimizer._update_model_bit16_weights = update_model_bit16_weights


def _skip_reduction_at_stage_0(engine: DeepSpeedEngine) -> None:
    """Keep the gradients where they are, if one data-parallel rank would reduce them at ZeRO stage 0.

    DeepSpeed 0.19.8 (runtime/engine.py, buffered_allreduce_fallback, allreduce_bucket) concatenates the gradients,
    divides them by 1, and copies them back. It also rounds them to communication_data_type: that of BF16_Optimizer's
    fp32 gradients is bf16, which changes sums of several micro-batches.
    """
    reduce, optimizer = engine.buffered_allreduce_fallback, engine.optimizer
    if not isinstance(engine, PipelineEngine) or engine.zero_optimization() or engine.has_moe_layers \
            or engine.gradient_predivide_factor() != 1 \
            or dist.get_world_size(engine.mpu.get_data_parallel_group()) > 1:
        return
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    dtypes = {parameter.dtype for parameter in parameters}
    keeps_own = hasattr(optimizer, "get_grads_for_reduction")  # BF16_Optimizer: fp32 sums of gradients in bf16

    def buffered_allreduce_fallback(grads: Any = None, elements_per_buffer: int = 0) -> None:
        if dtypes != {engine.communication_data_type} or (keeps_own and engine.gradient_accumulation_steps() > 1):
            reduce(grads, elements_per_buffer)
            return
        for parameter in () if keeps_own else parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    engine.buffered_allreduce_fallback = buffered_allreduce_fallback


def _add_gradients_at_once(engine: DeepSpeedEngine) -> None:
    """Add all gradients to BF16_Optimizer's sums by one operator.

    DeepSpeed 0.19.8 (runtime/bf16_optimizer.py, _update_hp_grad) calls several for each of them, and if the sums are in
    fp32, makes a copy first.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer) or getattr(optimizer, "autoep_folding_tp_group", None) is not None:
        return
    add = optimizer.update_hp_grads
    parameters = [(parameter, total, group, index) for group, members in enumerate(optimizer.bf16_groups)
                  for index, (parameter, total) in enumerate(
                      zip(members, optimizer.fp32_groups_gradients[group], strict=True))]

    @torch.no_grad()
    def update_hp_grads(clear_lp_grads: bool = False) -> None:
        if optimizer.immediate_grad_update or clear_lp_grads:
            add(clear_lp_grads)
            return
        totals, gradients = [], []
        for parameter, total, group, index in parameters:
            if parameter.grad is not None:
                totals.append(total)
                gradients.append(parameter.grad.view(total.shape))
                parameter._hp_grad = total
                optimizer.fp32_groups_has_gradients[group][index] = True
        if totals:
            torch._foreach_add_(totals, gradients)

    optimizer.update_hp_grads = update_hp_grads
