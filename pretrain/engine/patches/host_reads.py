"""Read fewer values from the device in a step: for each one, the host waits for a GPU.

DeepSpeed 0.19.8 reads one value to decide whether an update is skipped, and others that this one implies. Without them
the same updates are skipped, and weights and states have the same bits. Older versions, which decide otherwise, keep
their reads. Guarded by tests/distributed/memory/test_traffic.py, which counts them, by
tests/distributed/test_update_passes.py, which compares the steps with those of DeepSpeed, and by
tests/distributed/test_skipped_updates.py.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from pretrain.engine.patches.skip import checks_norm
from pretrain.engine.update import Update


def read_less(engine: DeepSpeedEngine, update: Update) -> None:
    """Apply the functions of this file that fit the engine."""
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer) or not checks_norm(optimizer):
        return
    if isinstance(optimizer, FP16_Optimizer):
        _read_one_flag_for_all_gradients(optimizer.overflow_checker)
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    if optimizer.cpu_offload:
        _read_norms_together(optimizer)
        _keep_flag_on_device(optimizer)
    if optimizer.compute_grad_norm and optimizer.check_grad_overflow:
        update.step = _decide_once(optimizer, update.step)
        if engine.optimizer_name() != "muon" and _counts_every_gradient(engine):
            _decide_by_norm(optimizer)


def _read_one_flag_for_all_gradients(checker: Any) -> None:
    """Find NaN and infinity without ZeRO in all gradients together: `has_overflow_serial` (utils.py) reads each."""
    from deepspeed.runtime.utils import has_inf_or_nan  # older versions have none

    def has_overflow_serial(parameters: Iterable[torch.nn.Parameter]) -> bool:
        found = [has_inf_or_nan(parameter.grad) for parameter in parameters if parameter.grad is not None]
        return bool(torch.stack(found).any()) if found else False

    checker.has_overflow_serial = has_overflow_serial


def _read_norms_together(optimizer: Any) -> None:
    """Copy the norms of an offloaded optimizer's gradients to the host at once.

    `complete_grad_norm_calculation_for_cpu_offload` (zero/stage_1_and_2.py) calls `item` of each. Here it gets numbers
    of numpy, which have this method, too.
    """
    complete = optimizer.complete_grad_norm_calculation_for_cpu_offload

    def complete_grad_norm_calculation_for_cpu_offload(parameters: Any) -> torch.Tensor:
        norms = optimizer.norm_for_param_grads
        if any(map(torch.is_tensor, norms.values())):  # in the first parameter group
            on_host = np.array(torch.stack([*norms.values()]).tolist())
            optimizer.norm_for_param_grads = dict(zip(norms, on_host, strict=True))
        total: torch.Tensor = complete(parameters)
        return total

    optimizer.complete_grad_norm_calculation_for_cpu_offload = complete_grad_norm_calculation_for_cpu_offload


def _keep_flag_on_device(optimizer: Any) -> None:
    """Combine the flags of an offloaded optimizer's gradients on the device (zero/stage_1_and_2.py)."""
    has_overflow = optimizer.has_overflow

    def update_offload_overflow_tracker(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            optimizer.local_overflow = optimizer._has_inf_or_nan(gradient.data) | optimizer.local_overflow

    def has_overflow_of_flag(partition_gradients: bool = True) -> bool:
        optimizer.local_overflow = bool(optimizer.local_overflow)
        found: bool = has_overflow(partition_gradients)
        return found

    optimizer.update_offload_overflow_tracker = update_offload_overflow_tracker
    optimizer.has_overflow = has_overflow_of_flag


def _decide_once(optimizer: Any, update: Callable[..., Any]) -> Callable[..., None]:
    """Return `update`, the optimizer's step, which checks its norm once.

    `step` (zero/stage_1_and_2.py) skips the update if the norm is not finite. If it is, `unscale_and_clip_grads` checks
    it again for each parameter group.
    """
    module: Any = sys.modules[type(optimizer).__module__]

    def step(*args: Any, **kwargs: Any) -> None:
        is_invalid = module.is_invalid_grad_norm  # with the checks of skip.also_skip_if
        answers: list[bool] = []

        def is_invalid_grad_norm(norm: Any) -> bool:
            if not answers:
                answers.append(is_invalid(norm))
            return answers[0]

        module.is_invalid_grad_norm = is_invalid_grad_norm
        try:
            update(*args, **kwargs)
        finally:
            module.is_invalid_grad_norm = is_invalid

    return step


def _counts_every_gradient(engine: DeepSpeedEngine) -> bool:
    """Return whether the global norm counts all gradients. Of copies on several ranks, it counts one."""
    has_copies = isinstance(engine, PipelineEngine) and engine.num_stages > 1 and any(
        isinstance(spec, TiedLayerSpec) for spec in engine.module._layer_specs)
    return not has_copies and bwc_tensor_model_parallel_world_size(engine.mpu) == 1


def _decide_by_norm(optimizer: Any) -> None:
    """Skip updates by their norm alone: with a NaN or an infinite gradient, it is not finite either.

    `step` (zero/stage_1_and_2.py) first looks for NaN and infinity in each gradient, sums the flags over the ranks, and
    reads the result. The norm is computed and checked after that, unless there are some.
    """
    optimizer.check_overflow = lambda partition_gradients=True: None
    optimizer.update_offload_overflow_tracker = lambda gradient: None
