"""CPU time that the step loop spends on its own measurements: the rows of metrics.jsonl and the phase timers."""

import functools
import time
from collections.abc import Callable
from typing import Any

from pretrain.engine import steps
from pretrain.engine.measure.phases import PhaseTimers
from pretrain.engine.measure.update_size import UpdateSize
from pretrain.monitor.meter import Meter

_FUNCTIONS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (Meter, ("log",)), (PhaseTimers, ("enter", "_add_up")), (UpdateSize, ("_copy_sample", "_measure")),
    (steps, ("_keep_rank_loss",)))


class MeasurementTime:
    """Adds up the CPU time of this thread in the functions that measure, which it wraps.

    CPU time does not depend on other programs, and does not contain the waiting for a device or for other ranks.
    """

    def __init__(self) -> None:
        self._seconds, self._is_inside, self._start = 0.0, False, time.thread_time()
        for owner, names in _FUNCTIONS:
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def take(self) -> dict[str, float]:
        """Return the CPU time in these functions and of the whole thread since the last call, in seconds."""
        now = time.thread_time()
        taken = {"measurement_cpu_s": self._seconds, "thread_cpu_s": now - self._start}
        self._seconds, self._start = 0.0, now
        return taken

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, start = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds += time.thread_time() - start
                self._is_inside = False

        return timed
