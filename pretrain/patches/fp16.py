"""Defect A: fp16 without ZeRO trains with a wrong loss scale. Guarded by tests/distributed/test_upstream.py, test_a_*.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer


def scale_loss_at_stage_0(engine: DeepSpeedEngine) -> None:
    """Scale the gradient of the loss, and undo the optimizer step that FP16_Optimizer runs at construction.

    DeepSpeed 0.19.8: `DeepSpeedEngine.backward` (runtime/engine.py) scales the loss only for a ZeROOptimizer, but
    `FP16_Optimizer.step` divides by the scale in any case (upstream PR #8393). A hook on the loss scales the gradient,
    so that the reported loss stays unscaled.

    At construction FP16_Optimizer runs one step with zero gradients (runtime/fp16/fused_optimizer.py,
    initialize_optimizer_states). This step decays the master weights and counts as Adam's first step.
    """
    optimizer = engine.optimizer
    optimizer.optimizer.state.clear()
    optimizer.refresh_fp32_params()
    if not engine.fp16_enabled():
        return
    loss_fn: Callable[..., torch.Tensor] = engine.module.loss_fn

    def scaled_loss_fn(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        loss = loss_fn(outputs, labels)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * optimizer.loss_scale_config.cur_scale)
        return loss

    engine.module.loss_fn = scaled_loss_fn
    _unscale_before_the_scale_grows(optimizer)


def _unscale_before_the_scale_grows(optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
    """Divide the gradients by the scale that the loss was multiplied by, not by the scale of the next step.

    DeepSpeed 0.19.8: `step` (runtime/fp16/fused_optimizer.py, unfused_optimizer.py) increases the loss scale before it
    divides gradients and norm by the scale. Each such step uses half of its gradient.

    FP16_UnfusedOptimizer also reports the norm of the scaled gradients. And it counts tied gradients once per pipeline
    stage: it looks for `ds_pipe_replicated` on the gradient, but only the parameter has this attribute.
    """
    update_scale, step = optimizer._update_scale, optimizer.step
    unfused = isinstance(optimizer, FP16_UnfusedOptimizer)

    def step_then_grow(closure: None = None) -> bool:
        for parameter in (p for group in optimizer.fp16_groups for p in group if unfused and p.grad is not None):
            parameter.grad.ds_pipe_replicated = getattr(parameter, "ds_pipe_replicated", False)
        overflow: bool = step(closure)
        if not overflow:
            if unfused:
                optimizer._global_grad_norm /= optimizer.loss_scale_config.cur_scale
            update_scale(False)
        return overflow

    optimizer._update_scale = lambda skip: update_scale(skip) if skip else None
    optimizer.step = step_then_grow
