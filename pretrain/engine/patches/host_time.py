"""Save host time per step, which small models feel: passes over all parameters in Python that change nothing.

DeepSpeed 0.19.8 makes them in each step, at any size of the model. None of these functions changes a value. Guarded by
tests/distributed/test_update_passes.py, which compares the steps with those of DeepSpeed bit by bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.distributed.deepspeed_version import shortcut
from pretrain.engine.attachments import attachments


def save_host_time(engine: DeepSpeedEngine) -> None:
    """Apply the functions of this file that fit the engine."""
    for save in (_keep_mode, _clear_known_gradients, _skip_reduction_at_stage_0, _add_gradients_at_once,
                 _compute_norms_at_once):
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


def _add_gradients_at_once(engine: DeepSpeedEngine) -> None:
    """Add all gradients in bf16 to BF16_Optimizer's sums in fp32 by one operator.

    DeepSpeed 0.19.8 (runtime/bf16_optimizer.py, _update_hp_grad) first copies each of them in fp32.
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


def _compute_norms_at_once(engine: DeepSpeedEngine) -> None:
    """Compute the norms of all gradients in BF16_Optimizer's step by one operator, as long as no ranks share matrices.

    DeepSpeed 0.19.8 (runtime/utils.py, get_global_norm_of_tensors) calls four for each gradient, and sums over one
    rank.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer) \
            or dist.get_world_size(engine.mpu.get_model_parallel_group()) > 1:
        return
    update, norm_of = attachments(engine).update, bf16_optimizer.get_global_norm_of_tensors
    step = update.step

    def norm_at_once(input_tensors: Any, norm_type: float = 2, **others: Any) -> torch.Tensor:
        tensors = [*input_tensors]
        if norm_type != 2 or not tensors or any(x.dtype != torch.float32 for x in tensors):
            return norm_of(input_tensors=tensors, norm_type=norm_type, **others)
        norm = torch.stack(torch._foreach_norm(tensors)).pow(2).sum().pow(0.5)
        return norm if norm.isfinite() else torch.full_like(norm, -1.0)  # as DeepSpeed marks it

    def step_with_norm_at_once(*args: Any, **kwargs: Any) -> Any:
        bf16_optimizer.get_global_norm_of_tensors = norm_at_once
        try:
            return step(*args, **kwargs)
        finally:
            bf16_optimizer.get_global_norm_of_tensors = norm_of

    update.step = step_with_norm_at_once
