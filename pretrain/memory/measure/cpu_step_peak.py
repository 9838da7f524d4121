"""Peak memory of one training step on a CPU, where torch counts no bytes. The measurement does not slow down the step.

    peak = bytes of the tensors that the engine holds before the step + peak of the bytes that the step allocates

The first part is an inventory of the engine, taken between two steps. The second part comes from counters of
jemalloc >= 5.3, which train.py uses if it is installed (pretrain/distributed/allocator.py): the maximum of (bytes
allocated - bytes freed) of the calling thread. On a CPU torch runs forward pass, backward pass and optimizer in this
one thread. The counters include blocks that operators allocate internally. Each block counts with the size class that
jemalloc rounds it up to.

glibc's malloc has no such counters. Without jemalloc the inventory is taken once more, after the backward pass of the
step.
"""

import ctypes

from deepspeed import DeepSpeedEngine

from pretrain.memory.measure.observe_steps import call_after_backward
from pretrain.memory.measure.tensor_inventory import held_footprint


class StepPeak:
    """Measures the step between `begin` and `end`, on this rank."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # None if the allocator has no counters
        self.held_bytes: int | None = None  # between backward pass and optimizer step; None if the peak is known
        self._before_bytes: int | None = None

    def begin(self, engine: DeepSpeedEngine) -> None:
        """Call this right before the step, in the thread that runs it."""
        self._before_bytes = held_footprint(engine).total()
        if not _mallctl("thread.peak.reset", None):
            self._before_bytes = None
            call_after_backward(engine, lambda: self._take_inventory(engine))

    def end(self) -> None:
        """Call this after the step."""
        growth = ctypes.c_uint64()
        if self._before_bytes is not None and _mallctl("thread.peak.read", growth):
            self.peak_bytes = self._before_bytes + growth.value

    def _take_inventory(self, engine: DeepSpeedEngine) -> None:
        if self.held_bytes is None:
            self.held_bytes = held_footprint(engine).total()


def _mallctl(name: str, value: ctypes.c_uint64 | None) -> bool:
    """Run a command of jemalloc, or read a value from it (jemalloc(3), MALLCTL NAMESPACE).

    Returns False if malloc is not jemalloc's, or if its version does not have the name.
    """
    try:
        mallctl = ctypes.CDLL(None).mallctl
    except (OSError, AttributeError):
        return False
    size = ctypes.c_size_t(ctypes.sizeof(ctypes.c_uint64))
    pointers = (None, None) if value is None else (ctypes.byref(value), ctypes.byref(size))
    return bool(mallctl(name.encode(), *pointers, None, ctypes.c_size_t(0)) == 0)
