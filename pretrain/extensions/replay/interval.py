"""Which steps have the keys of the flight recorder that read much memory: every N-th one, where N follows from costs.

With --flight_interval auto, the first steps of a start are measured, and all ranks agree on N.
"""

from statistics import median

import torch
import torch.distributed as dist

LARGEST_COST = 0.002  # of the time of a step
_LEAST_FOR_ALL_KEYS = 0.0005  # of the time of a step, if the keys of each step alone cost nearly as much
_FULL = (3, 5)  # steps of this start with all keys; the first one is not measured: it allocates memory
_DECIDED_AFTER = 8  # steps of this start; the others up to here are measured without these keys


class FlightInterval:
    """Says which steps have all keys, and chooses the interval.

    Args:
        given: --flight_interval; None: auto.
    """

    def __init__(self, given: int | None, device: torch.device) -> None:
        self.steps = given  # None: not chosen yet
        self.measured_ms: dict[str, float] = {}  # see Header.measured_ms
        self._cost_ms = 0.0  # of the keys of the interval, in a step that has them
        self._device = device
        self._trained = 0
        self._cheap_ms: list[float] = []  # cost of the other keys
        self._step_ms: list[float] = []  # steps without the keys of the interval

    def is_full(self, step: int) -> bool:
        """Return whether the next step has all keys. `step`: its number; call it once for each step."""
        self._trained += 1
        return self._trained in _FULL if self.steps is None else step % self.steps == 0

    @property
    def is_measured(self) -> bool:
        """True during a step whose cost is to be measured."""
        return self.steps is None and self._trained == _FULL[-1]

    def observe(self, *, step_ms: float, cost_ms: float, is_full: bool) -> bool:
        """Add a step. Returns whether the interval has just been chosen; then collective."""
        if self.steps is not None:
            return False
        if self.is_measured:
            self._cost_ms = cost_ms
        elif self._trained > _FULL[0] and not is_full:
            self._step_ms.append(step_ms)
            self._cheap_ms.append(cost_ms)
        if self._trained < _DECIDED_AFTER:
            return False
        own = [self._cost_ms, median(self._cheap_ms), -median(self._step_ms)]
        worst = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        cost_ms, cheap_ms, negative_step_ms = (round(value, 3) for value in worst.tolist())
        self.measured_ms = {"step": -negative_step_ms, "each_step": cheap_ms, "interval": cost_ms}
        self.steps = interval_for(cost_ms, cheap_ms, -negative_step_ms)
        return True


def interval_for(cost_ms: float, cheap_ms: float, step_ms: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20 ... with which all keys cost at most LARGEST_COST of the time.

    Args:
        cost_ms: of the keys of the interval, in a step that has them.
        cheap_ms: of the other keys, in each step.
        step_ms: time of a step.
    """
    rest_ms = max(LARGEST_COST * step_ms - cheap_ms, _LEAST_FOR_ALL_KEYS * step_ms)
    power = 1
    while True:
        for digit in (1, 2, 5):
            if cost_ms <= rest_ms * digit * power:
                return digit * power
        power *= 10
