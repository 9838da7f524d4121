"""The update of an engine: DeepSpeed's `optimizer.step`, wrapped once, and the ordered list of parts around it."""

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine

from pretrain.engine.patches.skip import also_skip_if

if TYPE_CHECKING:
    from pretrain.engine.clipping import AdaptiveClipping, ValueClipping
    from pretrain.engine.layer_digests import ReducedDigest
    from pretrain.engine.patches.fp16 import GrowingScale, UnscaledNorm
    from pretrain.engine.patches.late_skip import LateSkip
    from pretrain.engine.update_guard import UpdateGuard
    from pretrain.engine.update_statistics import NoiseScale, UpdateSize


class UpdatePart:
    """Code that runs around the optimizer's step. A part overrides the methods that it needs."""

    reads_norm = False  # whether `rejects` is called

    def before(self) -> None:
        """Called before the step, in the order of `Update.parts`."""

    def rejects(self, scaled_norm: torch.Tensor) -> bool:
        """Called with the global gradient norm, still scaled by fp16's loss scale. True: all ranks skip the update.

        It is not called if the norm is not finite, or if an earlier part has rejected the update. DeepSpeed may check
        the norm several times in a step.
        """
        return False

    def after(self) -> None:
        """Called after the step, in the reverse order. `optimizer.overflow`: the update was skipped."""


class Update:
    """Wraps `engine.optimizer.step`. Each attribute is a part, or None; `parts` defines their order.

    The order does not depend on when a part is set. Parts may be set until the first step.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.recomputation: UpdatePart | None = None  # resilience/recompute.py
        self.guard: UpdateGuard | None = None
        self.size: UpdateSize | None = None
        self.reduced: ReducedDigest | None = None
        self.noise_scale: NoiseScale | None = None
        self.adaptive_clipping: AdaptiveClipping | None = None
        self.value_clipping: ValueClipping | None = None
        self.growing_scale: GrowingScale | None = None
        self.unscaled_norm: UnscaledNorm | None = None
        self.late: LateSkip | None = None  # the device decides whether updates are skipped
        self.learning_rate = math.nan  # of the newest update
        self.step = engine.optimizer.step  # of DeepSpeed; patches/skip.py replaces it (defect M)
        # A function, because a bound method cannot keep the attributes that torch's schedules look for.
        engine.optimizer.step = functools.wraps(self.step)(lambda *args, **kwargs: self._run(*args, **kwargs))

    @property
    def parts(self) -> list[UpdatePart]:
        """The parts, from the outermost one to the one next to DeepSpeed's step."""
        ordered = (
            self.recomputation,  # before anything changes: it computes with the weights of this step
            self.guard,  # reports what the others have left: why the update was skipped
            self.size,  # compares the weights before and after everything else
            self.reduced,  # reads the gradients before anything changes them
            self.noise_scale,  # reads the loss scale before the step, and the norm after it
            self.adaptive_clipping,  # records the norm only if the guard has not rejected it
            self.value_clipping,  # before the norm
            self.growing_scale,  # defect P: after every part that reads the norm of this step
            self.unscaled_norm,  # with the loss scale of this step
        )
        return [part for part in ordered if part is not None]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.late is not None:
            self.late.settle()  # the schedule does not move after a skipped update
        self.learning_rate = float(self._engine.get_lr()[0])
        parts = self.parts
        readers = [part for part in parts if part.reads_norm]
        for part in parts:
            part.before()
        with contextlib.ExitStack() as stack:
            if readers:
                stack.enter_context(also_skip_if(lambda norm: any(part.rejects(norm) for part in readers),
                                                 self._engine.optimizer))
            elif self.late is not None:
                stack.enter_context(self.late.deciding())
            stack.enter_context(torch.no_grad())  # torch 2.13 rejects the all-gather of DeepSpeed 0.18 with gradients
            result = self.step(*args, **kwargs)
        for part in reversed(parts):
            part.after()
        return result
