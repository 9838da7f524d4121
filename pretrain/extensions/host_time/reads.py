"""Read fewer values from the device in a step: for each one, the host waits for a GPU.

DeepSpeed 0.19.8 reads one value to decide whether an update is skipped, and others that this one implies. Without them
the same updates are skipped, and weights and states have the same bits. Older versions, which decide otherwise, keep
their reads. Guarded by tests/extensions/host_time/test_reads.py, which counts them, test_updates.py, which compares the
steps with those of DeepSpeed, and by tests/distributed/test_skipped_updates.py.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16 import fused_optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from pretrain.engine.patches.skip import checks_norm, replaced
from pretrain.engine.update import Update


def read_less(engine: DeepSpeedEngine, update: Update) -> None:
    """Apply the functions of this file that fit the engine."""
    optimizer = engine.optimizer
    if isinstance(optimizer, torch.optim.Optimizer) or not checks_norm(optimizer):
        return
    if isinstance(optimizer, FP16_Optimizer):
        if _counts_every_gradient(engine) and not optimizer.has_moe_layers:  # the norm shows NaN and infinity, too
            optimizer.overflow_checker.has_overflow = lambda parameters: False
        else:
            _read_one_flag_for_all_gradients(optimizer.overflow_checker)
        update.step = _read_sum_of_norms(update.step)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        _read_one_flag_for_all_gradients(optimizer.overflow_checker)
    if isinstance(optimizer, BF16_Optimizer) and not optimizer.has_moe_layers:
        update.step = _read_norm_and_factor(optimizer, update)
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    if optimizer.cpu_offload:
        _read_norms_together(optimizer)
        _keep_flag_on_device(optimizer)
    if optimizer.compute_grad_norm and optimizer.check_grad_overflow:
        update.step = _decide_once(optimizer, update.step)
        if engine.optimizer_name() != "muon" and _counts_every_gradient(engine):
            _decide_by_norm(optimizer)
        elif not optimizer.cpu_offload:
            _add_flag_to_norm(optimizer)


def _read_one_flag_for_all_gradients(checker: Any) -> None:
    """Find NaN and infinity without ZeRO in all gradients together: `has_overflow_serial` (utils.py) reads each."""
    from deepspeed.runtime.utils import has_inf_or_nan  # older versions have none

    def has_overflow_serial(parameters: Iterable[torch.nn.Parameter]) -> bool:
        found = [has_inf_or_nan(parameter.grad) for parameter in parameters if parameter.grad is not None]
        return bool(torch.stack(found).any()) if found else False

    checker.has_overflow_serial = has_overflow_serial


def _read_sum_of_norms(update: Callable[..., Any]) -> Callable[..., None]:
    """Return `update`, the step of FP16_Optimizer, which reads the norm over all parameter groups and ranks only.

    `get_flattened_grad_norm` (utils.py) reads the norm of each group, and adds their squares in Python. Here they are
    added on the device, in fp64, too.
    """
    original = fused_optimizer.get_flattened_grad_norm

    def get_flattened_grad_norm(parameters: list[torch.Tensor], mpu: Any, grad_norm_mask: Any) -> float:
        if any(map(len, grad_norm_mask)):  # other ranks count these gradients
            norm: float = original(parameters, mpu=mpu, grad_norm_mask=grad_norm_mask)
            return norm
        total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        for parameter in parameters:
            if parameter.grad is not None:
                total += parameter.grad.float().norm().double().square()
        total = total.float()
        dist.all_reduce(total, group=mpu.get_model_parallel_group())
        return float(total.item() ** 0.5)  # as DeepSpeed: sqrt may have another last bit

    def step(*args: Any, **kwargs: Any) -> None:
        with replaced(fused_optimizer, get_flattened_grad_norm=get_flattened_grad_norm):
            update(*args, **kwargs)

    return step


def _read_norm_and_factor(optimizer: BF16_Optimizer, update: Update) -> Callable[..., None]:
    """Return the step of BF16_Optimizer, which reads the norm and the factor of clipping together.

    DeepSpeed (utils.py) reads the norm to check it (is_invalid_grad_norm), and the factor to find out whether it clips
    (clip_tensors_by_global_norm). It calls three operators for the norm of each gradient (get_global_norm_of_tensors),
    and one for each clipped one; here one operator takes all gradients. If the device decides (patches/late_skip.py),
    nothing is read, and all gradients are multiplied by at most 1.
    """
    original = update.step

    def step(*args: Any, **kwargs: Any) -> None:
        factor, clips = torch.ones(()), False

        def global_norm(input_tensors: list[torch.Tensor], mpu: Any, norm_type: float) -> torch.Tensor | float:
            nonlocal factor, clips
            squared = torch.stack(torch._foreach_norm(input_tensors, norm_type, dtype=torch.float32)).pow(2).sum()
            dist.all_reduce(squared, group=mpu.get_model_parallel_group())
            norm = squared.pow(0.5)
            factor = optimizer.clip_grad / (norm + 1e-6)
            if update.late is not None and update.late.is_deciding:
                factor, clips = factor.clamp(max=1.0), True
                return norm
            norm_on_host, factor_on_host = torch.stack([norm, factor]).tolist()
            clips = factor_on_host < 1
            return float(norm_on_host)

        def clip(input_tensors: list[torch.Tensor], **_: Any) -> None:
            if clips:
                torch._foreach_mul_(input_tensors, factor)

        with replaced(bf16_optimizer, get_global_norm_of_tensors=global_norm, clip_tensors_by_global_norm=clip):
            original(*args, **kwargs)

    return step


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
        is_invalid = module.is_invalid_grad_norm  # includes the checks of skip.also_skip_if
        answers: list[bool] = []

        def is_invalid_grad_norm(norm: Any) -> bool:
            if not answers:
                answers.append(is_invalid(norm))
            return answers[0]

        with replaced(module, is_invalid_grad_norm=is_invalid_grad_norm):
            update(*args, **kwargs)

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


def _add_flag_to_norm(optimizer: Any) -> None:
    """Read the flag of all gradients with their norm, which becomes infinite if it is set.

    `step` (zero/stage_1_and_2.py) reads the flag first, and skips the update in the same way if either is set.
    """
    global_norm, found = optimizer.scaled_global_norm, torch.zeros(1)

    def check_overflow(partition_gradients: bool = True) -> None:
        nonlocal found
        found = optimizer.has_overflow_partitioned_grads_serial().byte()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=found, op=dist.ReduceOp.MAX)

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        norm: torch.Tensor = global_norm(norm_type)
        return torch.where(found.bool().any(), torch.inf, norm)

    optimizer.check_overflow, optimizer.scaled_global_norm = check_overflow, scaled_global_norm
