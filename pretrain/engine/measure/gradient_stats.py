"""Highest gradient norm and fraction of clipped updates over several steps. Nothing waits for the device until read."""

import math

import torch
from deepspeed import DeepSpeedEngine

from pretrain.engine.steps import global_grad_norm


def clip_limit(engine: DeepSpeedEngine) -> float:
    """Return the largest global gradient norm of the last update; infinity without clipping."""
    adaptive = getattr(engine, "adaptive_clipping", None)
    return adaptive.limit_in_force if adaptive is not None else float(engine.gradient_clipping()) or math.inf


class GradientStats:
    """Statistics of the global gradient norms (before clipping) since the last call of `take`."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._restart()

    def _restart(self) -> None:
        self._largest = torch.full((), -math.inf, device=self._engine.device)
        self._clipped = torch.zeros((), device=self._engine.device)
        self._steps = 0

    def observe(self) -> None:
        """Add the last step. Call it after each `train_batch`; it does not synchronize the device."""
        self._steps += 1
        value = global_grad_norm(self._engine)
        if value is None or (not torch.is_tensor(value) and not math.isfinite(value)):
            return  # the update was skipped, or there is no norm
        norm = torch.as_tensor(value, dtype=torch.float32).to(self._engine.device, non_blocking=True)
        self._largest = torch.fmax(self._largest, norm)  # ignores NaN
        if not getattr(self._engine.optimizer, "overflow", False):
            self._clipped += norm > clip_limit(self._engine)

    def take(self) -> dict[str, float | None]:
        """Return the values of a row of metrics.jsonl, and restart. Synchronizes the device.

        A value is None without clipping, or if no step had a finite norm.
        """
        largest, limit = float(self._largest), clip_limit(self._engine)
        row = {"grad_norm_max": largest if largest > -math.inf else None,
               "clip_norm": limit if limit < math.inf else None,
               "clip_rate": float(self._clipped) / self._steps if self._steps and limit < math.inf else None}
        self._restart()
        return row
