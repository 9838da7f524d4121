"""Spikes of the loss and the gradient norm: values far above the usual ones of the newest steps.

Both parts of the comparison are robust, and follow the fall of the loss. The usual value is the median of the newest
quarter of the window, lowered by how far the newest values were below the median of those before them. The usual
deviation is the median deviation from it, or that of the highest twentieth if this is larger. The distribution of norms
is skewed, so they are compared by their logarithms. tests/engine/test_spikes.py counts the spikes of healthy runs:
by mean and standard deviation, 2,100 steps of small models had 8.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypedDict

from pretrain.errors import format_number

_FEWEST = 4  # values whose median is compared with the next one
_FEWEST_NEWEST, _MOST_NEWEST = 8, 64  # values of the newest quarter of a window
_MOST_STORED = 1024  # values in a checkpoint
_STD_OF_MEDIAN, _STD_OF_95TH = 1.4826, 1 / 1.645  # standard deviations of a normal distribution
_THRESHOLD = 6.0  # default of --spike_threshold: with it, the following ratios to the usual value are limits
_LOSS_RATIOS, _NORM_RATIOS = (1.03, 2.0), (3.0, 8.0)  # a smaller one is no spike, a larger one always is
_SMALL_LOSS = 1.0  # losses below have its upper limit: twice as much is no spike, such as 0.02 after 0.01


@dataclass(frozen=True)
class Spike:
    """A value that is more than the threshold above the usual value."""

    name: str  # "loss" or "grad_norm"
    value: float
    mean: float  # usual value
    std: float  # usual deviation upwards
    z: float  # number of these deviations; of the gradient norm, by logarithms

    def __str__(self) -> str:
        name = "gradient norm" if self.name == "grad_norm" else self.name
        return f"a spike of the {name}: {format_number(self.value, 4)} (usual {format_number(self.mean, 4)}, " \
               f"deviation {self.std:.2g})"


class SpikeWindow:
    """The newest values of the loss or of the gradient norm.

    Only finite values enter, and no norm of 0. There is no decision before half of the window is filled. A lasting
    change of the level is usual after half of the newest quarter.
    """

    def __init__(self, name: str, *, length: int, threshold: float) -> None:
        self._name, self._threshold, self._is_log = name, threshold, name == "grad_norm"
        self._length, self._newest = length, min(max(length // 4, _FEWEST_NEWEST), _MOST_NEWEST)
        # The oldest ones are only compared with, so that a checkpoint's values have the same deviations.
        self._values: deque[float] = deque(maxlen=length + self._newest)
        self._steps: deque[int] = deque(maxlen=length + self._newest)  # of these values
        self._above: deque[float] = deque(maxlen=length)  # how far each was above the median of those before it

    def find(self, value: float) -> Spike | None:
        """Return the spike if `value` is one. Changes nothing. NaN and infinity are no spikes: see `Guard`."""
        if not self._enters(value) or len(self._values) < self._length // 2:
            return None
        usual = self._median() + min(_quantile(self._newest_of(self._above), 0.5), 0.0)
        above, (least, most) = self._scaled(value) - usual, self._bounds(usual)
        if above <= self._threshold * least:  # most steps end here
            return None
        deviation = min(max(self._deviation(), least), most)
        if above <= self._threshold * deviation:
            return None
        if self._is_log:
            mean = math.exp(usual)
            return Spike(self._name, value, mean, mean * math.expm1(deviation), above / deviation)
        return Spike(self._name, value, usual, deviation, above / deviation)

    def add(self, step: int, value: float) -> Spike | None:
        """Add the value of a step, and return the spike if it is one."""
        spike = self.find(value)
        if self._enters(value):
            if len(self._values) >= _FEWEST:
                self._above.append(self._scaled(value) - self._median())
            self._steps.append(step)
            self._values.append(value)
        return spike

    def forget_after(self, step: int) -> None:
        """Remove the values of later steps, because the run has returned to `step`."""
        while self._steps and self._steps[-1] > step:
            for each in (self._steps, self._values, self._above):
                if each:
                    each.pop()

    def values(self) -> list[float]:
        """Return the newest values, for a checkpoint."""
        return [*self._values][-_MOST_STORED:]

    def restore(self, values: Sequence[float], *, step: int = 0) -> None:
        """Replace the values by those of a checkpoint, whose window may have had another length."""
        for each in (self._steps, self._values, self._above):
            each.clear()
        for value in filter(self._enters, values):
            if len(self._values) >= _FEWEST:
                self._above.append(self._scaled(value) - self._median())
            self._steps.append(step)
            self._values.append(value)

    def _enters(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self._is_log)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self._is_log else value

    def _newest_of(self, values: deque[float]) -> Iterable[float]:
        return islice(reversed(values), self._newest)

    def _median(self) -> float:
        """Return the median of the newest values, scaled."""
        return self._scaled(_quantile(self._newest_of(self._values), 0.5))

    def _deviation(self) -> float:
        """Return the usual deviation upwards, as a standard deviation."""
        middle = _quantile(self._above, 0.5)
        return max(_STD_OF_MEDIAN * _quantile((abs(value - middle) for value in self._above), 0.5),
                   _STD_OF_95TH * (_quantile(self._above, 0.95) - middle))

    def _bounds(self, usual: float) -> tuple[float, float]:
        """Return the smallest and the largest deviation that a decision uses."""
        if self._is_log:
            least, most = (math.log(ratio) for ratio in _NORM_RATIOS)
        else:
            least, most = ((ratio - 1) * abs(usual) for ratio in _LOSS_RATIOS)
            most = max(most, _SMALL_LOSS)
        return least / _THRESHOLD, most / _THRESHOLD


def _quantile(values: Iterable[float], fraction: float) -> float:
    """Return the value at this fraction of the sorted values."""
    ordered = sorted(values)
    return ordered[int(fraction * len(ordered))]


class SpikeState(TypedDict, total=False):
    """The newest values in the manifest of a checkpoint."""

    loss: list[float]
    grad_norm: list[float]


class SpikeWindows:
    """The windows of a run by name. All ranks have the same ones."""

    def __init__(self, *, length: int, threshold: float) -> None:
        self.by_name = {name: SpikeWindow(name, length=length, threshold=threshold) for name in ("loss", "grad_norm")}

    def state(self) -> SpikeState | None:
        """Return the values for a checkpoint; None before the first step."""
        values = SpikeState(loss=self.by_name["loss"].values(), grad_norm=self.by_name["grad_norm"].values())
        return values if any(values.values()) else None

    def set_state(self, state: Mapping[str, list[float]] | None) -> None:
        """Continue with the values of a checkpoint; None: with empty windows."""
        for name, window in self.by_name.items():
            window.restore((state or {}).get(name, []))
