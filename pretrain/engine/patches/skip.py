"""Defects M, N and O of skipped updates, and hooks into DeepSpeed's decision to skip an update.

Guarded by tests/distributed/test_skipped_updates.py, in all precisions and layouts.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler


def is_invalid_grad_norm(norm: torch.Tensor | float) -> bool:
    """Return whether a norm is NaN, infinite, or -1, which DeepSpeed writes for both."""
    return not 0 <= float(norm) < math.inf


def skip_non_finite_fp32_updates(engine: DeepSpeedEngine, update: Callable[..., Any]) -> Callable[..., None]:
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
    in this one for torch's optimizers (defect M) and older versions (skip_by_norm.py).
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
