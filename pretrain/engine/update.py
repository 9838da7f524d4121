"""The update of an engine: DeepSpeed's `optimizer.step`, wrapped once, and the ordered list of parts around it."""

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from deepspeed import DeepSpeedEngine

from pretrain.callback import UpdatePart, naming, overrides
from pretrain.engine.patches.skip import also_skip_if

if TYPE_CHECKING:
    from pretrain.engine.patches.late_skip import LateSkip

# `order` of the parts of this package, from the outermost one to the one next to DeepSpeed's step; callbacks have 50
RECOMPUTATION = 10  # before anything changes: it computes with the weights of this step
GUARD = 20  # reports what the others have left: why the update was skipped
UPDATE_SIZE = 30  # compares the weights before and after everything else
REDUCED_DIGEST = 40  # reads the gradients before anything changes them
NOISE_SCALE = 60  # reads the loss scale before the step, and the norm after it
ADAPTIVE_CLIPPING = 70  # records the norm only if the guard has not rejected it
VALUE_CLIPPING = 80  # before the norm
GROWING_SCALE = 90  # defect P: after every part that reads the norm of this step
UNSCALED_NORM = 100  # with the loss scale of this step

_Part = TypeVar("_Part", bound=UpdatePart)


class Update:
    """Wraps `engine.optimizer.step`. Parts may be added until the first step."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.parts: list[UpdatePart] = []  # in their order
        self.rejected_norm: torch.Tensor | None = None  # of this step, scaled, if a part has rejected the update
        self.late: LateSkip | None = None  # the device decides whether updates are skipped
        self.learning_rate = math.nan  # of the newest update
        self.step = engine.optimizer.step  # of DeepSpeed; patches/skip.py replaces it (defect M)
        # A function, because a bound method cannot keep the attributes that torch's schedules look for.
        engine.optimizer.step = functools.wraps(self.step)(lambda *args, **kwargs: self._run(*args, **kwargs))

    def add(self, part: _Part) -> _Part:
        """Add a part, and return it."""
        self.parts = sorted([*self.parts, part], key=lambda each: (each.order, type(each).__name__))
        return part

    def find(self, kind: type[_Part]) -> _Part | None:
        """Return the part of this class; None if there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.late is not None:
            self.late.settle()  # the schedule does not move after a skipped update
        self.learning_rate = float(self._engine.get_lr()[0])
        parts, self.rejected_norm = self.parts, None
        readers = [part for part in parts if part.reads_norm and overrides(part, "rejects")]

        def rejects(scaled_norm: torch.Tensor) -> bool:
            is_rejected = any(_rejects(part, scaled_norm) for part in readers)
            self.rejected_norm = scaled_norm if is_rejected else self.rejected_norm
            return is_rejected

        for part in parts:
            with naming(part, "before_update"):
                part.before_update()
        with contextlib.ExitStack() as stack:
            if readers:
                stack.enter_context(also_skip_if(rejects, self._engine.optimizer))
            elif self.late is not None:
                stack.enter_context(self.late.deciding())
            stack.enter_context(torch.no_grad())  # torch 2.13 rejects the all-gather of DeepSpeed 0.18 with gradients
            result = self.step(*args, **kwargs)
        for part in reversed(parts):
            with naming(part, "after_update"):
                part.after_update()
        return result


def _rejects(part: UpdatePart, scaled_norm: torch.Tensor) -> bool:
    with naming(part, "rejects"):
        return part.rejects(scaled_norm)
