"""Clip each element of the gradients, which DeepSpeed 0.19.8 cannot do, between their reduction and their norm.

Guarded by tests/distributed/test_recipe.py, which compares every optimizer class of DeepSpeed with autograd.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def clip_gradient_values(engine: DeepSpeedEngine, limit: float, loss_scale: Callable[[], float]) -> None:
    """Limit each element of the unscaled gradients to [-limit, limit] in each step, before their norm is computed.

    The gradients are clipped in place, when they are complete and, with a loss scale, still scaled. `loss_scale`
    returns this scale. A tensor with NaN or infinity becomes NaN in one element, so that DeepSpeed skips the update.

    DeepSpeed 0.19.8 computes the norm in one method of each optimizer class: scaled_global_norm
    (runtime/zero/stage_1_and_2.py), _get_norm_groups (runtime/zero/stage3.py), get_grads_for_norm
    (runtime/bf16_optimizer.py), step (runtime/fp16/fused_optimizer.py, runtime/fp16/unfused_optimizer.py).
    """
    optimizer = engine.optimizer

    def clip(tensors: Iterable[torch.Tensor]) -> None:
        scaled_limit = limit * loss_scale()
        for tensor in tensors:
            _clip_(tensor, scaled_limit)

    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        name = "_get_norm_groups" if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) else "scaled_global_norm"
        offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
        _call_before(optimizer, name, lambda: _clip_offloaded(optimizer, clip) if offloaded else
                     clip(grad for group in optimizer.averaged_gradients.values() for grad in group or ()))
    elif isinstance(optimizer, BF16_Optimizer):
        gradients = optimizer.get_grads_for_norm

        def get_clipped(for_clipping: bool = False) -> Any:
            if not for_clipping:  # the call for the norm comes first
                clip(gradients(for_clipping=True))
            return gradients(for_clipping)

        optimizer.get_grads_for_norm = get_clipped
    elif hasattr(engine, "clip_fp32_gradients") and isinstance(optimizer, torch.optim.Optimizer):
        _call_before(engine, "clip_fp32_gradients", lambda: clip(_gradients(engine)))
    else:  # fp16 and bf16 without ZeRO
        _call_before(optimizer, "step", lambda: clip(_gradients(engine)))


def _gradients(engine: DeepSpeedEngine) -> Iterable[torch.Tensor]:
    return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]


def _call_before(owner: Any, name: str, function: Callable[[], None]) -> None:
    """Replace the method `name` of `owner` by one that first calls `function`."""
    method = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        function()
        return method(*args, **kwargs)

    setattr(owner, name, replaced)


def _clip_offloaded(optimizer: Any, clip: Callable[[Iterable[torch.Tensor]], None]) -> None:
    """Clip gradients in host memory, and recompute their norms, which DeepSpeed computed as it copied them there."""
    flats = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3
    flats = optimizer.single_partition_of_fp32_groups if flats is None else flats
    norms = optimizer.norm_for_param_grads
    for name in norms:  # one tensor for each parameter, so that a NaN remains in its norm
        group, *_, start, length = optimizer.grad_position[name]
        gradient = flats[group].grad.view(-1).narrow(0, start, length)
        clip([gradient])
        norms[name] = torch.linalg.vector_norm(gradient, dtype=norms[name].dtype)


@torch.no_grad()
def _clip_(tensor: torch.Tensor, limit: float) -> None:
    """Limit the elements in place, without temporary memory and without waiting for the device."""
    if tensor.numel() == 0:
        return
    not_finite = torch.linalg.vector_norm(tensor, float("inf")) * 0  # 0, or NaN if an element is NaN or infinite
    limit = min(limit, torch.finfo(tensor.dtype).max)
    tensor.clamp_(-limit, limit).view(-1)[:1].add_(not_finite)
