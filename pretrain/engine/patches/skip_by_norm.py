"""Skip updates because of their global norm with optimizers that do not: those of DeepSpeed before 0.19.8.

DeepSpeed 0.18.0 to 0.19.7 look for NaN and infinity in each gradient, and not at all in fp32, in bf16 with ZeRO-3 or
without ZeRO, and in BF16_Optimizer. Then a norm that is not finite becomes 1, and all weights become NaN
(runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, step), or an assertion ends the run (runtime/bf16_optimizer.py).

Guarded by tests/distributed/test_skipped_updates.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import get_global_norm_of_tensors, get_norm_with_moe_layers
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.engine.patches import skip
from pretrain.engine.patches.pipeline import is_counted

Step = Callable[..., Any]


def skip_invalid_norms(engine: DeepSpeedEngine, update: Step) -> Step:
    """Return `update`, the optimizer's step, with a check of the global norm. Call it after the other patches.

    The norm is computed once more than DeepSpeed does. `skip.also_skip_if` extends the check.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        return _zero_step(optimizer, update)
    if isinstance(optimizer, BF16_Optimizer):
        return _bf16_step(optimizer, update)
    return _stage_0_step(engine, update)


def _zero_step(optimizer: Any, update: Step) -> Step:
    """Check the norm where ZeRO has decided by the gradients, and updates the loss scale."""
    _report_invalid_norms_as_infinite(optimizer)

    def norm() -> torch.Tensor:
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            return torch.linalg.vector_norm(torch.stack(optimizer._get_norm_groups()))
        total: torch.Tensor = optimizer.scaled_global_norm()
        return total

    def step(*args: Any, **kwargs: Any) -> None:
        update_scale = optimizer._update_scale  # with what other parts have put around it
        optimizer.overflow = False
        checks = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) or (
            optimizer.dtype != torch.bfloat16 or optimizer.check_grad_overflow)  # as DeepSpeed 0.19.8

        def decide_and_update_scale(overflow: bool = False) -> None:
            optimizer.overflow = overflow or (checks and skip.is_invalid_grad_norm(norm()))
            update_scale(optimizer.overflow)

        optimizer._update_scale = decide_and_update_scale
        try:
            update(*args, **kwargs)
        finally:
            optimizer._update_scale = update_scale
        if optimizer.overflow:
            optimizer._global_grad_norm = float("inf")

    return step


def _report_invalid_norms_as_infinite(optimizer: Any) -> None:
    """Replace -1, by which DeepSpeed marks an invalid norm of a parameter group, and which it then squares."""
    direct, offloaded = optimizer.get_grad_norm_direct, optimizer.complete_grad_norm_calculation_for_cpu_offload

    def marked(norm: torch.Tensor) -> torch.Tensor:
        return torch.where(norm < 0, torch.full_like(norm, float("inf")), norm)

    optimizer.get_grad_norm_direct = lambda *args, **kwargs: marked(direct(*args, **kwargs))
    optimizer.complete_grad_norm_calculation_for_cpu_offload = lambda *args: marked(offloaded(*args))


def _bf16_step(optimizer: BF16_Optimizer, update: Step) -> Step:
    def norm() -> torch.Tensor:
        gradients, experts = optimizer.get_grads_for_norm()
        total: torch.Tensor = get_global_norm_of_tensors(gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type)
        if optimizer.has_moe_layers:
            total = get_norm_with_moe_layers(total, mpu=optimizer.mpu, expert_tensors=experts,
                                             norm_type=optimizer.norm_type)
        return total

    def step(*args: Any, **kwargs: Any) -> None:
        total = norm()
        optimizer.overflow = skip.is_invalid_grad_norm(total)
        if optimizer.overflow:
            optimizer._global_grad_norm = float("inf")
            optimizer.zero_grad()
        elif total == 0:
            _update_with_zero_gradients(optimizer, lambda: update(*args, **kwargs))
        else:
            update(*args, **kwargs)

    return step


def _update_with_zero_gradients(optimizer: BF16_Optimizer, update: Callable[[], None]) -> None:
    """Update with a norm of 0, for which `BF16_Optimizer.step` fails at an assertion."""
    original = bf16_optimizer.get_global_norm_of_tensors

    def tiny_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(original(*args, **kwargs), torch.finfo(torch.float32).tiny)

    with skip.replaced(bf16_optimizer, get_global_norm_of_tensors=tiny_norm):
        update()
    optimizer._global_grad_norm = 0.0


def _stage_0_step(engine: DeepSpeedEngine, update: Step) -> Step:
    """Check the norm before DeepSpeed's optimizers for 16-bit parameters without ZeRO."""
    optimizer = engine.optimizer

    def step(*args: Any, **kwargs: Any) -> None:
        counted = [p.grad for p in engine.module.parameters() if p.grad is not None and is_counted(engine, p)]
        optimizer.overflow = skip.is_invalid_grad_norm(get_global_norm_of_tensors(counted, mpu=engine.mpu))
        if not optimizer.overflow:
            update(*args, **kwargs)
            return
        optimizer._global_grad_norm = float("inf")
        if engine.fp16_enabled():
            optimizer._update_scale(True)
        optimizer.zero_grad(set_to_none=True)

    return step
