"""Peak memory of one training step on a CPU, where torch counts no bytes. The measurement does not slow down the step.

    peak = bytes of the tensors that the engine holds before the step + peak of the bytes that the step allocates

The first part is the sum of all storages that can be reached from the engine, taken between two steps. The second part
comes from counters of jemalloc >= 5.3, which train.py uses if it is installed (pretrain/distributed/process.py): the
maximum of (bytes allocated - bytes freed) of the calling thread. On a CPU torch runs forward pass, backward pass and
optimizer in this one thread. The counters include blocks that operators allocate internally. Each block counts with the
size class that jemalloc rounds it up to.

A collective's thread may free a tensor last: gloo's threads hold the tensors of a collective until it is complete, and
race with the thread that waits for it. For the counters such a tensor stays allocated. Their sum is known at the end of
the step: what the counters say has grown, less what the engine holds in addition. The peak is at most that much lower.

glibc's malloc has no such counters. Without jemalloc the sum is taken once more, after the backward pass of the step.
"""

import ctypes

from deepspeed import DeepSpeedEngine

from pretrain.memory.engine_tensors import call_after_backward, walk_tensors
from pretrain.memory.storage_tracker import storage_of


class StepPeak:
    """Measures the step between `begin` and `end`, on this rank."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # at most; None if the allocator has no counters
        self.freed_elsewhere_bytes = 0  # by other threads, so that the peak may be lower by up to that much
        self.held_bytes: int | None = None  # between backward pass and optimizer step; None if the peak is known
        self._before_bytes: int | None = None
        self._counted_before_bytes = 0
        self._engine: DeepSpeedEngine | None = None  # during the step

    def begin(self, engine: DeepSpeedEngine) -> None:
        """Call this right before the step, in the thread that runs it."""
        self._before_bytes = held_bytes(engine)
        self._engine, self._counted_before_bytes = engine, _thread_bytes()
        if not _mallctl("thread.peak.reset", None):
            self._before_bytes = None
            call_after_backward(engine, lambda: self._record_held(engine))

    def end(self) -> None:
        """Call this after the step."""
        engine, self._engine, growth = self._engine, None, ctypes.c_uint64()
        if self._before_bytes is not None and engine is not None and _mallctl("thread.peak.read", growth):
            counted = _thread_bytes() - self._counted_before_bytes
            self.peak_bytes = self._before_bytes + growth.value
            self.freed_elsewhere_bytes = max(0, counted - (held_bytes(engine) - self._before_bytes))

    def _record_held(self, engine: DeepSpeedEngine) -> None:
        if self.held_bytes is None:
            self.held_bytes = held_bytes(engine)


def _thread_bytes() -> int:
    """Return the bytes that the calling thread has allocated, less those that it has freed; 0 without counters."""
    allocated, freed = ctypes.c_uint64(), ctypes.c_uint64()
    known = _mallctl("thread.allocated", allocated) and _mallctl("thread.deallocated", freed)
    return allocated.value - freed.value if known else 0


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


def held_bytes(engine: DeepSpeedEngine) -> int:
    """Return the bytes of all storages that can be reached from the engine, each counted once."""
    storages = (storage_of(tensor) for _, tensor in walk_tensors(engine))
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage is not None}.values())
