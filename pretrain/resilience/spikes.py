"""Find spikes of the loss or the gradient norm: values far above the mean of the last steps. Imports no torch."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

_SMALLEST_STD = 1e-3  # as a fraction of the mean; a constant loss would otherwise have spikes of rounding errors


@dataclass(frozen=True)
class Spike:
    """A value that is more than the threshold above the mean of the window."""

    name: str  # "loss" or "grad_norm"
    value: float
    mean: float
    std: float

    @property
    def z(self) -> float:
        """Number of standard deviations between the value and the mean."""
        return (self.value - self.mean) / self.std

    def __str__(self) -> str:
        name = "gradient norm" if self.name == "grad_norm" else self.name
        return f"a spike of the {name}: {self.value:.4g} (mean {self.mean:.4g}, standard deviation {self.std:.2g})"


class SpikeWindow:
    """Mean and standard deviation of one value over the last `length` steps.

    A z-score over a rolling window is also the criterion of OLMo-core (src/olmo_core/optim/skip_step_optimizer.py),
    with the same defaults: 128 steps, 6 standard deviations, no decision before half of the window is filled.

    Only finite values enter. A spike enters as mean + threshold * std, so that it does not hide the next spike. After a
    lasting change of the level these entries raise mean and standard deviation, until the new level is accepted.
    """

    def __init__(self, name: str, *, length: int, threshold: float) -> None:
        self._name, self._length, self._threshold = name, length, threshold
        self._entries: deque[tuple[int, float]] = deque(maxlen=length)  # (step, value)

    def find(self, value: float) -> Spike | None:
        """Return the spike if `value` is one. Changes nothing. NaN and infinity are no spikes: see `Guard`."""
        if not math.isfinite(value) or len(self._entries) < self._length // 2:
            return None
        values = np.fromiter((entry for _, entry in self._entries), float, len(self._entries))
        mean = float(values.mean())
        std = max(float(values.std()), _SMALLEST_STD * abs(mean), float(np.finfo(float).tiny))
        return Spike(self._name, value, mean, std) if value > mean + self._threshold * std else None

    def add(self, step: int, value: float) -> Spike | None:
        """Add the value of a step, and return the spike if it is one."""
        spike = self.find(value)
        if spike is not None:
            value = spike.mean + self._threshold * spike.std
        if math.isfinite(value):
            self._entries.append((step, value))
        return spike

    def forget_after(self, step: int) -> None:
        """Remove the values of later steps, because the run has returned to `step`."""
        while self._entries and self._entries[-1][0] > step:
            self._entries.pop()
