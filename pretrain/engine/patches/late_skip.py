"""Let the device decide whether an update is skipped, so that no step waits for it.

DeepSpeed 0.19.8 reads the norm of the gradients in each step, to decide in Python whether the optimizer is called
(is_invalid_grad_norm in runtime/bf16_optimizer.py:402, runtime/zero/stage_1_and_2.py:3043 and 3203,
runtime/zero/stage3.py:2888). torch's fused optimizers take this flag from the device (`found_inf`, which torch's
GradScaler sets): if it is 1, weights, states and the number of steps keep their bits. The host reads the flag when the
next update begins, after the forward and backward passes of that step were launched, and then counts the skipped step
and takes back the step of the schedule.

Guarded by tests/distributed/test_skipped_updates.py (layouts `*_fused`).
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from pretrain.engine.patches.skip import checks_norm, replaced


class Outcome:
    """Says whether one update was skipped."""

    def __init__(self, late: "LateSkip") -> None:
        self._late = late
        self.value: bool | None = None  # None: the host has not read the flag yet

    def is_skipped(self) -> bool:
        """Return whether the update was skipped. Waits for the device, unless the next update has begun."""
        if self.value is None:
            self._late.settle()
        return bool(self.value)


class LateSkip:
    """The decisions of an engine about its updates: made by the device, and read one step later."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.is_deciding = False  # during an update on which the device decides
        self.pending: Outcome | None = None  # of the newest update, until its flag was read
        on_cuda = engine.device.type == "cuda"
        self._flag = torch.zeros((), pin_memory=True) if on_cuda else torch.zeros(())
        self._copied = get_accelerator().Event() if on_cuda else None
        self._infinity = torch.full((), torch.inf, device=engine.device)
        self._before: tuple[dict[str, Any], list[dict[str, Any]]] = {}, []  # schedule and settings before its step

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Call the optimizer's step in the block. The flag of the update before must have been read."""
        optimizer, is_invalid = self._engine.optimizer, None

        def is_invalid_grad_norm(norm: torch.Tensor) -> bool:
            nonlocal is_invalid
            if is_invalid is None:  # ZeRO-1 and 2 ask again for each parameter group
                is_invalid = ((norm >= 0) & (norm < torch.inf)).logical_not().reshape(())
                optimizer.optimizer.found_inf = is_invalid.to(torch.float32)
            return False

        self.is_deciding = True
        try:
            with replaced(sys.modules[type(optimizer).__module__], is_invalid_grad_norm=is_invalid_grad_norm):
                yield
        finally:
            self.is_deciding = False
            flag = vars(optimizer.optimizer).pop("found_inf", None)
        if is_invalid is not None:
            self._begin_read(flag, is_invalid)

    def _begin_read(self, flag: torch.Tensor, is_invalid: torch.Tensor) -> None:
        optimizer, scheduler = self._engine.optimizer, self._engine.lr_scheduler
        norm = optimizer._global_grad_norm
        # DeepSpeed reports the norm of a skipped update like this, and its functions may return -1 for it
        optimizer._global_grad_norm = torch.where(is_invalid, self._infinity, norm)
        self._flag.copy_(flag, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._before = _shallow(vars(scheduler)) if scheduler is not None else {}, [
            _shallow(group) for group in optimizer.optimizer.param_groups]
        self.pending = Outcome(self)

    def settle(self) -> None:
        """Read the flag of the newest update, if there is one, and do what DeepSpeed does after a skipped update."""
        if self.pending is None:
            return
        if self._copied is not None:
            self._copied.synchronize()  # the device has the work of a complete step to do after this copy
        outcome, self.pending = self.pending, None
        outcome.value = bool(self._flag)
        if not outcome.value:
            return
        engine, (scheduler, groups) = self._engine, self._before
        engine.skipped_steps += 1
        engine.optimizer.overflow = True  # until the next update, as in DeepSpeed: it is part of a checkpoint
        if engine.lr_scheduler is not None:
            vars(engine.lr_scheduler).update(scheduler)
        for group, before in zip(engine.optimizer.optimizer.param_groups, groups, strict=True):
            group.update(before)


def _shallow(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings. Those of a schedule may be lists that it changes; parameters are left out."""
    return {key: list(value) if isinstance(value, list) else value for key, value in values.items() if key != "params"}


def late_skip(engine: DeepSpeedEngine) -> LateSkip | None:
    """Return the late decisions of an engine; None if its optimizer cannot skip an update on the device.

    Offloaded optimizers compute on the host, DeepSpeed's FusedAdam (csrc/adam/multi_tensor_adam.cu) ignores its flag,
    Muon changes its momentum before the norm is known, and the loss scale of fp16 depends on the flag at once.
    """
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", None)
    if engine.fp16_enabled() or engine.optimizer_name() == "muon" or not checks_norm(optimizer) or not getattr(
            base, "_step_supports_amp_scaling", False):
        return None
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        decides = optimizer.compute_grad_norm and not optimizer.cpu_offload and (
            optimizer.check_grad_overflow or optimizer.dtype != torch.bfloat16)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        decides = not optimizer.offload_optimizer
    else:
        decides = isinstance(optimizer, BF16_Optimizer)
    return LateSkip(engine) if decides else None
