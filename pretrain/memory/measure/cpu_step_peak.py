"""The tensors of one training step on a CPU, where torch keeps no count. Measuring them does not slow the step.

    peak = tensors that the engine holds before the step + the most that the step allocates on top of them

The first part is an inventory of the engine, taken between two steps. The second part is a counter of jemalloc >= 5.3,
with which train.py runs where it is installed (pretrain/distributed/allocator.py): bytes allocated less bytes
freed by the calling thread, and their maximum. On a CPU torch runs forward pass, backward pass and optimizer in that
one thread. The counter includes what operators allocate inside; a block counts as the size class that jemalloc
rounds it up to.

glibc's malloc has no such counter. There the inventory is taken once more within the step, after its backward pass.
"""

import ctypes

from deepspeed import DeepSpeedEngine

from pretrain.memory.measure.observe_steps import call_after_backward
from pretrain.memory.measure.tensor_inventory import held


class StepTensors:
    """Measurement of the step between `begin` and `end`, of this rank, in bytes."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # None: this allocator keeps no count
        self.held_bytes: int | None = None  # between backward pass and optimizer step; None where the peak is known
        self._before_bytes: int | None = None

    def begin(self, engine: DeepSpeedEngine) -> None:
        """Call this right before the step, in the thread that runs it."""
        self._before_bytes = held(engine).total()
        if not _mallctl("thread.peak.reset", None):
            self._before_bytes = None
            call_after_backward(engine, lambda: self._look(engine))

    def end(self) -> None:
        """Call this after the step."""
        grown = ctypes.c_uint64()
        if self._before_bytes is not None and _mallctl("thread.peak.read", grown):
            self.peak_bytes = self._before_bytes + grown.value

    def _look(self, engine: DeepSpeedEngine) -> None:
        if self.held_bytes is None:
            self.held_bytes = held(engine).total()


def _mallctl(name: str, value: ctypes.c_uint64 | None) -> bool:
    """Run a command of jemalloc's, or read a value (jemalloc(3), MALLCTL NAMESPACE). False where malloc is not
    jemalloc's, or its version does not know the name.
    """
    try:
        mallctl = ctypes.CDLL(None).mallctl
    except (OSError, AttributeError):
        return False
    size = ctypes.c_size_t(ctypes.sizeof(ctypes.c_uint64))
    pointers = (None, None) if value is None else (ctypes.byref(value), ctypes.byref(size))
    return bool(mallctl(name.encode(), *pointers, None, ctypes.c_size_t(0)) == 0)
