"""Measure the time in which this rank waits in collective operations: for other ranks, and for the transfers.

Everything that a rank does between two waits is its own time. Of ranks that train together, the slowest one waits
least, and all others wait for it.

All functions of torch.distributed and deepspeed.comm end in methods of torch's process group, and a host that waits
does so in `Work.wait`. With gloo, only `Work.wait` blocks, and it is measured with the clock of the host. On a device,
the current stream waits for that of the operation from there on, or from the operation itself if it is synchronous:
both are measured with events. Not measured are operations inside of a compiled graph (tensor parallelism with
torch.compile): they count as computation.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Work

from pretrain.engine.phases import PhaseTimers

# of ProcessGroup: those that torch's functions call; a version of torch may lack some
_OPERATIONS = ("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
               "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce",
               "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send", "_allgather_base",
               "_reduce_scatter_base")


class _Measured:
    """Where the waits of this process are added."""

    timers: PhaseTimers | None = None
    host_s = 0.0  # until now, by the clock of the host


def measure_waits(timers: PhaseTimers) -> None:
    """Add all waits of this process to the phases of `timers` from now on."""
    if _Measured.timers is None:
        setattr(Work, "wait", _measured(Work.wait))  # noqa: B010  mypy: a method
        if get_accelerator().device_name() != "cpu":
            for name in _OPERATIONS:
                if hasattr(ProcessGroup, name):
                    setattr(ProcessGroup, name, _measured(getattr(ProcessGroup, name)))
    _Measured.timers = timers


def host_waited_s() -> float:
    """Return the seconds that the host of this rank has waited until now."""
    return _Measured.host_s


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        timers = _Measured.timers
        if timers is None or not timers.begin_wait():
            return function(*args, **kwargs)
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            _Measured.host_s += time.perf_counter() - start
            timers.end_wait()

    return measured
