"""Defects A, P, W and AF of fp16: wrong loss scale and norm, and a step at construction.

Guarded by tests/distributed/test_upstream.py, test_a_*, test_p_* and test_w_*.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter

from pretrain.callback import UpdatePart
from pretrain.engine.update import GROWING_SCALE, UNSCALED_NORM


def undo_step_at_construction(optimizer: Any) -> None:
    """Defect AF: undo the optimizer step that the fp16 optimizers of ZeRO stage 0 run at construction.

    DeepSpeed 0.19.8 (runtime/fp16/fused_optimizer.py, initialize_optimizer_states) runs it with zero gradients. It
    decays the master weights and counts as Adam's first step.
    """
    optimizer.optimizer.state.clear()
    optimizer.refresh_fp32_params()


def scale_loss_at_stage_0(engine: DeepSpeedEngine) -> None:
    """Defect A: scale the gradient of the loss.

    DeepSpeed 0.19.8: `DeepSpeedEngine.backward` (runtime/engine.py) scales the loss only for a ZeROOptimizer, but
    `FP16_Optimizer.step` divides by the scale in any case (upstream PR #8393). A hook on the loss scales the gradient,
    so that the reported loss remains unscaled.
    """
    optimizer = engine.optimizer
    loss_fn: Callable[..., torch.Tensor] = engine.module.loss_fn

    def scaled_loss_fn(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
        loss = loss_fn(outputs, labels)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * optimizer.loss_scale_config.cur_scale)
        return loss

    engine.module.loss_fn = scaled_loss_fn


class UnscaledNorm(UpdatePart):
    """Defect W: report the norm of the unscaled gradients, which counts each parameter once.

    DeepSpeed 0.19.8 (runtime/fp16/unfused_optimizer.py, step) reports the norm of the scaled gradients. It counts tied
    gradients once per pipeline stage, and matrices of which the tensor-parallel ranks hold parts on the first of these
    ranks only, because it looks for the parameters' attributes on the gradients.
    """

    order = UNSCALED_NORM

    def __init__(self, optimizer: FP16_UnfusedOptimizer) -> None:
        self._optimizer = optimizer

    def before_update(self) -> None:
        for parameter in (p for group in self._optimizer.fp16_groups for p in group if p.grad is not None):
            parameter.grad.ds_pipe_replicated = getattr(parameter, "ds_pipe_replicated", False)
            parameter.grad.tensor_model_parallel = is_model_parallel_parameter(parameter)

    def after_update(self) -> None:
        if not self._optimizer.overflow:
            self._optimizer._global_grad_norm /= self._optimizer.loss_scale_config.cur_scale


class GrowingScale(UpdatePart):
    """Defect P: divide the gradients by the scale that the loss was multiplied by, not by the scale of the next step.

    DeepSpeed 0.19.8: `step` increases the loss scale before it divides the gradients by the scale
    (runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/fp16/fused_optimizer.py,
    runtime/fp16/unfused_optimizer.py). Each such step uses half of its gradient, unless it is clipped. ZeRO-3 and
    stage 0 also report half of the norm. Here the scale grows after the step. An overflow still changes it at once.
    """

    order = GROWING_SCALE

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, update_scale = optimizer, optimizer._update_scale
        self._update_scale = update_scale
        optimizer._update_scale = lambda skip: update_scale(skip) if skip else None

    def after_update(self) -> None:
        if not self._optimizer.overflow:
            self._update_scale(False)
