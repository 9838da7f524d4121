"""Defects M, N, O and AE of skipped updates, and hooks into DeepSpeed's decision to skip an update.

Guarded by tests/distributed/test_skipped_updates.py, in all precisions and layouts.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.utils import get_global_norm_of_tensors, get_norm_with_moe_layers
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.engine.patches.pipeline import is_counted

Step = Callable[..., Any]


def is_invalid_grad_norm(norm: torch.Tensor | float) -> bool:
    """Return whether a norm is NaN, infinite, or -1, which DeepSpeed writes for both."""
    return not 0 <= float(norm) < math.inf


def skip_non_finite_fp32_updates(engine: DeepSpeedEngine, update: Step) -> Step:
    """Defect M: return `update`, the optimizer's step in fp32 at ZeRO stage 0, with a check of the gradients.

    DeepSpeed 0.19.8: `_take_model_step` (runtime/engine.py) calls torch's optimizer without a check, and NaN reaches
    all weights. The engine skips the schedule and counts the skipped step if the optimizer has a true `overflow`.
    """
    optimizer = engine.optimizer
    optimizer.overflow = False

    def step(*args: Any, **kwargs: Any) -> None:
        if engine.gradient_clipping() == 0:  # otherwise the engine has called it
            engine.clip_fp32_gradients()
        optimizer.overflow = is_invalid_grad_norm(optimizer._global_grad_norm)
        if optimizer.overflow:
            optimizer._global_grad_norm = float("inf")  # as DeepSpeed's other optimizers
        else:
            update(*args, **kwargs)

    return step


def clear_gradients_of_skipped_updates(engine: DeepSpeedEngine) -> None:
    """Defect N: clear the gradients of a skipped update under ZeRO-1/2 with an offloaded optimizer.

    DeepSpeed 0.19.8: `step` (runtime/zero/stage_1_and_2.py) keeps `averaged_gradients` if it skips an offloaded update.
    With fp32 accumulation of 16-bit gradients, this is the buffer to which the next step adds: after one NaN, DeepSpeed
    skips all updates.
    """
    optimizer, reset = engine.optimizer, engine.optimizer.reset_cpu_buffers

    def reset_cpu_buffers() -> None:
        reset()
        optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)

    optimizer.reset_cpu_buffers = reset_cpu_buffers


def keep_muon_momentum(engine: DeepSpeedEngine) -> None:
    """Defect O: restore Muon's momentum after a skipped update under ZeRO-3.

    DeepSpeed 0.19.8: `step` (runtime/zero/stage3.py) updates the momentum before it checks the norm. A skipped update
    changes the momentum of all matrices whose own gradient is finite. The copy made here exists while the norm is
    computed; ZeRO-1 and ZeRO-2 keep such a copy all the time.
    """
    optimizer = engine.optimizer
    apply_muon, decide = optimizer._apply_muon_to_accumulated_grads, optimizer._loss_scale_update_and_overflow_cleanup
    before: dict[int, torch.Tensor | None] = {}  # sub-group -> its momentum before this update, None in the first one

    def momentum_of(sub_group: int) -> torch.Tensor | None:
        state = optimizer.optimizer.state.get(optimizer.fp32_partitioned_groups_flat[sub_group], {})
        momentum: torch.Tensor | None = state.get("momentum_buffer")
        return momentum

    def copy_and_apply() -> None:
        for sub_group in range(len(optimizer.fp16_groups)):
            momentum = momentum_of(sub_group)
            before[sub_group] = None if momentum is None else momentum.clone()
        apply_muon()

    def decide_and_restore() -> bool:
        skipped: bool = decide()
        for sub_group, saved in before.items() if skipped else ():
            momentum = momentum_of(sub_group)
            if momentum is not None:
                momentum.copy_(torch.zeros_like(momentum) if saved is None else saved)
        before.clear()
        return skipped

    optimizer._apply_muon_to_accumulated_grads = copy_and_apply
    optimizer._loss_scale_update_and_overflow_cleanup = decide_and_restore


def checks_norm(optimizer: Any) -> bool:
    """Return whether this optimizer of DeepSpeed skips an update because of its norm, as those of 0.19.8 do."""
    return hasattr(sys.modules[type(optimizer).__module__], is_invalid_grad_norm.__name__)


@contextlib.contextmanager
def replaced(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module in the block."""
    originals = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(originals)


@contextlib.contextmanager
def also_skip_if(is_rejected: Callable[[torch.Tensor], bool], optimizer: Any) -> Iterator[None]:
    """Make `optimizer.step` treat gradients as non-finite if `is_rejected` returns True for their global norm.

    In DeepSpeed 0.19.8 every optimizer passes the (scaled) global norm to `is_invalid_grad_norm` before it changes
    anything, and cleans up if this returns True (zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py,
    fp16/fused_optimizer.py, fp16/unfused_optimizer.py). Here the function is replaced in the optimizer's module, or
    in this one for torch's optimizers (defect M) and older versions (defect AE).
    """
    module: Any = sys.modules[type(optimizer).__module__ if checks_norm(optimizer) else __name__]
    is_invalid = module.is_invalid_grad_norm
    with replaced(module, is_invalid_grad_norm=lambda norm: is_invalid(norm) or is_rejected(norm)):
        yield


def update_loss_scale_if(counts: Callable[[], bool], optimizer: Any) -> None:
    """Let a skipped update change the loss scale only if `counts` returns True; never raise at the minimum scale.

    DeepSpeed 0.19.8 (runtime/fp16/loss_scaler.py) lowers the scale after every skipped update. At the minimum it raises
    a bare Exception. In other precisions than fp16 it only prints a warning, which this function suppresses.
    """
    if not hasattr(optimizer, "_update_scale"):
        return
    update_scale = optimizer._update_scale

    def guarded_update_scale(skip: bool) -> None:
        scaler = getattr(optimizer, "loss_scaler", None)  # read in each step: loading a checkpoint replaces it
        if isinstance(scaler, DynamicLossScaler):
            scaler.raise_error_at_min_scale = False
        if not skip or (counts() and not isinstance(scaler, LossScaler)):
            update_scale(skip)

    optimizer._update_scale = guarded_update_scale


def skip_invalid_norms(engine: DeepSpeedEngine, update: Step) -> Step:
    """Defect AE: return `update`, the optimizer's step, with a check of the global norm. Call it after other patches.

    DeepSpeed 0.18.0 to 0.19.7 look for NaN and infinity in each gradient, and not at all in fp32, in bf16 with ZeRO-3
    or without ZeRO, and in BF16_Optimizer. Then a norm that is not finite becomes 1, and all weights become NaN
    (runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, step), or an assertion ends the run
    (runtime/bf16_optimizer.py). The norm is computed once more than DeepSpeed does. `also_skip_if` extends the check.
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
            optimizer.overflow = overflow or (checks and is_invalid_grad_norm(norm()))
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
        optimizer.overflow = is_invalid_grad_norm(total)
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

    with replaced(bf16_optimizer, get_global_norm_of_tensors=tiny_norm):
        update()
    optimizer._global_grad_norm = 0.0


def _stage_0_step(engine: DeepSpeedEngine, update: Step) -> Step:
    """Check the norm before DeepSpeed's optimizers for 16-bit parameters without ZeRO."""
    optimizer = engine.optimizer

    def step(*args: Any, **kwargs: Any) -> None:
        counted = [p.grad for p in engine.module.parameters() if p.grad is not None and is_counted(engine, p)]
        optimizer.overflow = is_invalid_grad_norm(get_global_norm_of_tensors(counted, mpu=engine.mpu))
        if not optimizer.overflow:
            update(*args, **kwargs)
            return
        optimizer._global_grad_norm = float("inf")
        if engine.fp16_enabled():
            optimizer._update_scale(True)
        optimizer.zero_grad(set_to_none=True)

    return step
