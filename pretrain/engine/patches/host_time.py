"""Save host time per step, which small models feel: passes over all parameters in Python that change nothing.

DeepSpeed 0.19.8 makes them in each step, at any size of the model. None of these functions changes a value. Guarded by
tests/distributed/test_update_passes.py, which compares the steps with those of DeepSpeed bit by bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.distributed.deepspeed_version import shortcut


def save_host_time(engine: DeepSpeedEngine) -> None:
    """Apply the functions of this file that fit the engine."""
    for save in (_keep_mode, _clear_known_gradients, _skip_reduction_at_stage_0):
        with shortcut("host time per step"):
            save(engine)


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
