"""Skip an update on all ranks if its loss or gradient is not finite, or if the caller rejects it.

A skipped update leaves weights, master weights, optimizer states, learning-rate schedule and random states as they
are, clears the gradients, and increments `engine.skipped_steps` on every rank. DeepSpeed's optimizers do most of this
after an fp16 overflow; patches/skip.py uses this code in all other cases.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from pretrain.callback import UpdatePart
from pretrain.engine.attachments import attachments
from pretrain.engine.patches.late_skip import Outcome
from pretrain.engine.patches.skip import update_loss_scale_if
from pretrain.engine.steps import data_parallel_size, loss_scale, scale_at_minimum, tensor_parallel_size
from pretrain.engine.update import GUARD, Update

Veto = Callable[[torch.Tensor, torch.Tensor], bool]
"""(mean loss of the global batch, global gradient norm before clipping) -> skip the update; both are scalar tensors"""

NON_FINITE_LOSS = "non-finite loss"
NON_FINITE_GRADIENT = "non-finite gradient"
FP16_OVERFLOW = "fp16 overflow"
VETO = "veto"


@dataclass(frozen=True)
class SkippedUpdate:
    """Why the engine skipped an update; the same on all ranks."""

    reason: str  # one of the constants above
    is_bad: bool  # False if the update only lowered the loss scale of fp16, which is normal


def guard_updates(engine: DeepSpeedEngine, veto: Veto | None = None) -> None:
    """Make the engine skip every update with a non-finite loss or gradient, and those for which `veto` returns True.

    Call it once. `veto` is called on every rank, once per update with finite loss and gradient. If it returns True on
    any rank, all ranks skip the update. It costs two small all-reduces and a synchronization per step; without it,
    there is neither.
    """
    update = attachments(engine).update
    update.add(UpdateGuard(engine, update, veto))


def skipped_update(engine: DeepSpeedEngine) -> SkippedUpdate | None:
    """Return why the last update was skipped; None if it was applied. Collective; waits for the device."""
    return _guard(engine).newest()


def begin_skipped_update(engine: DeepSpeedEngine) -> Callable[[float], SkippedUpdate | None]:
    """Return a function that returns why the last update was skipped, given the loss of the step.

    If the device decided (patches/late_skip.py), the function waits for it, unless the next update has begun.
    """
    guard = _guard(engine)
    skipped, outcome = guard.skipped, guard.outcome
    return lambda loss: skipped if outcome is None or not outcome.is_skipped() else _not_finite(math.isfinite(loss))


def _guard(engine: DeepSpeedEngine) -> "UpdateGuard":
    guard = attachments(engine).update.find(UpdateGuard)
    assert guard is not None  # `guard_updates` was called
    return guard


def _not_finite(has_finite_loss: bool) -> SkippedUpdate:
    return SkippedUpdate(NON_FINITE_GRADIENT if has_finite_loss else NON_FINITE_LOSS, is_bad=True)


class UpdateGuard(UpdatePart):
    """Watches the losses of an engine and its updates; `guard_updates` describes its effect."""

    order = GUARD

    def __init__(self, engine: DeepSpeedEngine, update: Update, veto: Veto | None) -> None:
        self.skipped: SkippedUpdate | None = None
        self.outcome: Outcome | None = None  # of the newest update, if the device decided
        self._losses_of_outcome: list[torch.Tensor] = []
        self._update = update
        self._engine, self._veto, self.reads_norm = engine, veto, veto is not None
        self._zero = torch.zeros((), device=engine.device)
        self._reset()
        self._watch_losses()
        update_loss_scale_if(self._counts_for_loss_scale, engine.optimizer)

    @contextlib.contextmanager
    def rejecting_all(self) -> Iterator[None]:
        """Reject every update in the block."""
        before = self._veto, self.reads_norm
        self._veto, self.reads_norm = lambda loss, norm: True, True
        try:
            yield
        finally:
            self._veto, self.reads_norm = before

    def _reset(self) -> None:
        # losses of the micro-batches of this step; empty on all but the last stage
        self._losses: list[torch.Tensor] = []
        self._mean_loss: torch.Tensor | None = None
        self._vetoed: bool | None = None  # None until `veto` is asked
        self._was_at_minimum = False

    def _watch_losses(self) -> None:
        module = self._engine.module
        if not isinstance(self._engine, PipelineEngine):
            module.register_forward_hook(lambda module, inputs, loss: self._watch(loss))
            return
        loss_fn: Callable[..., torch.Tensor] = module.loss_fn

        def watched_loss_fn(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
            loss = loss_fn(outputs, labels)
            self._watch(loss)
            return loss

        module.loss_fn = watched_loss_fn

    def _watch(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch, and make its gradient NaN if the loss is not finite."""
        if not loss.requires_grad or attachments(self._engine).recomputes:
            return
        value = loss.detach()
        self._losses.append(value)
        # A single kernel: grad + value * 0, which is NaN if the value is NaN or infinite.
        loss.register_hook(lambda grad: torch.addcmul(grad, value, self._zero))

    def newest(self) -> SkippedUpdate | None:
        """Return why the newest update was skipped; collective if the device decided."""
        if self.outcome is None or not self.outcome.is_skipped():
            return self.skipped
        if self.skipped is None:
            self.skipped = _not_finite(bool(self._mean_of(self._losses_of_outcome).isfinite()))
        return self.skipped

    def before_update(self) -> None:
        self.skipped = None

    def after_update(self) -> None:
        optimizer = self._engine.optimizer
        if optimizer.overflow:
            self.skipped = self._explain()
        if (norm := self._update.rejected_norm) is not None:
            optimizer._global_grad_norm = norm / loss_scale(self._engine)  # DeepSpeed reports an infinite norm
        late = self._update.late
        self.outcome, self._losses_of_outcome = None if late is None else late.pending, self._losses
        self._reset()

    def rejects(self, scaled_norm: torch.Tensor) -> bool:
        """Ask `veto` once in each step; DeepSpeed may check the norm several times."""
        if self._veto is not None and self._vetoed is None:
            norm = scaled_norm / loss_scale(self._engine)
            answer = torch.tensor(float(self._veto(self._global_loss(), norm)), device=self._engine.device)
            dist.all_reduce(answer, op=dist.ReduceOp.MAX)
            self._vetoed = bool(answer)
        return bool(self._vetoed)

    def _global_loss(self) -> torch.Tensor:
        """Return the mean loss of the global batch on all ranks; collective if this step has not called it yet."""
        if self._mean_loss is None:
            self._mean_loss = self._mean_of(self._losses)
        return self._mean_loss

    def _mean_of(self, losses: list[torch.Tensor]) -> torch.Tensor:
        total = sum(losses, start=torch.zeros_like(self._zero)).reshape(())
        dist.all_reduce(total)  # the ranks that share matrices or sequences have equal losses
        engine = self._engine
        copies = data_parallel_size(engine) * tensor_parallel_size(engine) * engine.sequence_parallel_size
        return total / (engine.gradient_accumulation_steps() * copies)

    def _has_finite_loss(self) -> bool:
        """Collective. Only called if all ranks skip the update, where the additional collective does not matter."""
        return bool(self._global_loss().isfinite())

    def _counts_for_loss_scale(self) -> bool:
        """Return whether an update is skipped because of fp16's loss scale: a smaller one cannot help the loss."""
        self._was_at_minimum = scale_at_minimum(self._engine)
        return self._update.rejected_norm is None and self._has_finite_loss()

    def _explain(self) -> SkippedUpdate:
        if self._update.rejected_norm is not None:
            return SkippedUpdate(VETO, is_bad=True)
        has_finite_loss = self._has_finite_loss()
        if has_finite_loss and self._engine.fp16_enabled():
            return SkippedUpdate(FP16_OVERFLOW, is_bad=self._was_at_minimum)
        return _not_finite(has_finite_loss)
