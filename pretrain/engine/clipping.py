"""Clipping that DeepSpeed does not have: at a percentile of past norms, and of each element of the gradients."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.callback import UpdatePart
from pretrain.engine.steps import loss_scale
from pretrain.engine.update import ADAPTIVE_CLIPPING, VALUE_CLIPPING


def limit_of(norms: Sequence[float], *, percentile: float, window: int, largest: float) -> float:
    """Return the limit after updates with these norms; 0 for none.

    Args:
        window: number of norms of which the percentile is taken, with linear interpolation.
        largest: limit before that number is reached, and upper bound afterwards; 0 for none.
    """
    if len(norms) < window:
        return largest
    limit = float(torch.quantile(torch.tensor(norms, dtype=torch.float64), percentile / 100))
    if limit == 0:  # all gradients were zero; as a limit, 0 would mean none
        return largest
    return min(limit, largest) if largest else limit


class AdaptiveClipping(UpdatePart):
    """Clips the global norm at a percentile of the norms of past gradients (AutoClip: arXiv 2007.14469).

    The limit of a step is a percentile of the global norms, before clipping, of the last N updates. Until there are N,
    and if the percentile is larger, the limit is the JSON's gradient_clipping.

    The norms are Python numbers on each rank. DeepSpeed 0.19.8 waits for the norm in each step, as it looks for NaN
    (runtime/utils.py, is_invalid_grad_norm). Reading the norm there copies one number and waits for nothing else. All
    ranks have the same norm, and therefore the same limit.
    """

    order = ADAPTIVE_CLIPPING

    def __init__(self, engine: DeepSpeedEngine, *, percentile: float, window: int) -> None:
        self._engine, self._percentile = engine, percentile
        self._largest = float(engine.gradient_clipping())
        self._norms: deque[float] = deque(maxlen=window)
        self._norm: float | None = None  # of this step; None: not computed yet, or not finite
        self.limit_in_force = self._largest or math.inf  # limit of the last update; infinity: none

    def before_update(self) -> None:
        self._norm, self.limit_in_force = None, self._engine.optimizer.clip_grad or math.inf

    def rejects(self, scaled_norm: torch.Tensor) -> bool:
        """Record the norm, and reject nothing."""
        if self._norm is None:
            self._norm = float(scaled_norm) / loss_scale(self._engine)
        return False

    def after_update(self) -> None:
        """Set the next limit. A skipped update does not enter the norms: a NaN, an overflow of fp16, a spike."""
        if self._norm is not None and not self._engine.optimizer.overflow:
            self._norms.append(self._norm)
            self._set_limit()

    def _set_limit(self) -> None:
        """Set the limit of the next update, which all optimizers of DeepSpeed and patches/pipeline.py read."""
        self._engine.optimizer.clip_grad = limit_of(self._norms, percentile=self._percentile,
                                                    window=self._norms.maxlen or 1, largest=self._largest)

    def state(self) -> list[float]:
        """Return the norms, oldest first: with them, a resumed run continues with the same limits."""
        return list(self._norms)

    def set_state(self, norms: Sequence[float] | None) -> None:
        """Replace the norms; None removes them. Of more norms than the window holds, the newest are kept."""
        self._norms.clear()
        self._norms.extend(norms or ())
        self._set_limit()


class ValueClipping(UpdatePart):
    """Limits each element of the unscaled gradients to [-limit, limit] in each step, before their norm is computed.

    The gradients are clipped in place, when they are complete and, with a loss scale, still scaled. A tensor with NaN
    or infinity becomes NaN in one element, so that DeepSpeed skips the update.

    DeepSpeed 0.19.8 computes the norm in one method of each optimizer class: scaled_global_norm
    (runtime/zero/stage_1_and_2.py), _get_norm_groups (runtime/zero/stage3.py), get_grads_for_norm
    (runtime/bf16_optimizer.py), step (runtime/fp16/fused_optimizer.py, runtime/fp16/unfused_optimizer.py).

    Guarded by tests/distributed/test_recipe.py, which compares every optimizer class of DeepSpeed with autograd.
    """

    order = VALUE_CLIPPING

    def __init__(self, engine: DeepSpeedEngine, limit: float) -> None:
        self._engine, self._limit = engine, limit
        self._is_before_step = False  # the norm is computed in `step`
        optimizer = engine.optimizer
        if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
            name = "_get_norm_groups" if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) else "scaled_global_norm"
            offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
            _call_before(optimizer, name, lambda: _clip_offloaded(optimizer, self._clip) if offloaded else
                         self._clip(grad for group in optimizer.averaged_gradients.values() for grad in group or ()))
        elif isinstance(optimizer, BF16_Optimizer):
            gradients = optimizer.get_grads_for_norm

            def get_clipped(for_clipping: bool = False) -> Any:
                if not for_clipping:  # the call for the norm comes first
                    self._clip(gradients(for_clipping=True))
                return gradients(for_clipping)

            optimizer.get_grads_for_norm = get_clipped
        elif hasattr(engine, "clip_fp32_gradients") and isinstance(optimizer, torch.optim.Optimizer):
            _call_before(engine, "clip_fp32_gradients", self._clip_parameters)
        else:  # fp16 and bf16 without ZeRO
            self._is_before_step = True

    def before_update(self) -> None:
        if self._is_before_step:
            self._clip_parameters()

    def _clip_parameters(self) -> None:
        self._clip(parameter.grad for parameter in self._engine.module.parameters() if parameter.grad is not None)

    def _clip(self, gradients: Iterable[torch.Tensor]) -> None:
        scaled_limit = self._limit * loss_scale(self._engine)
        for gradient in gradients:
            _clip_(gradient, scaled_limit)


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
