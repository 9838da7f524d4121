"""The own time of this rank, in which it does not wait for others, and what slows its thread down on its host.

Everything that a rank does between two waits in collective operations is its own time. Of ranks that train together,
the slowest one waits least, and all others wait for it.

All functions of torch.distributed and deepspeed.comm end in methods of torch's process group, and a host that waits
does so in `Work.wait`. With gloo, only `Work.wait` blocks, and it is measured with the clock of the host. On a device,
the current stream waits for that of the operation from there on, or from the operation itself if it is synchronous:
both are measured with events. Not measured are operations inside of a compiled graph (tensor parallelism with
torch.compile): they count as computation.

The counters of the host are those of the kernel and of NVIDIA's driver. A read takes 0.15 ms. They are of the thread
that calls `read`, which executes the training steps, except for the throttling of its control group.
"""

import contextlib
import functools
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Work

from pretrain.engine.phases import BACKWARD, FORWARD, OPTIMIZER, OTHER, REDUCE, WAIT, PhaseTimers
from pretrain.extensions.slow_ranks.rank_times import TIMES

# methods of ProcessGroup that torch's functions call; a version of torch may lack some
_OPERATIONS = ("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
               "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce",
               "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send", "_allgather_base",
               "_reduce_scatter_base")

# bits of NVML's clocks event reasons that slow a GPU down without the user's wish: software and hardware thermal
# slowdown, hardware slowdown, power brake (nvml.h, nvmlClocksEventReason*, nvmlClocksThrottleReason*)
_ROOTS_V1, _ROOTS_V2 = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"), ("/sys/fs/cgroup",)
_SLOWDOWNS = 0x20 | 0x40 | 0x08 | 0x80



class OwnTimes:
    """Measures the times of this rank since the last logged step. A timer of the meter."""

    def __init__(self, phases: PhaseTimers) -> None:
        measure_waits(phases)
        self._phases, self._reader, self._waited_s = phases, HostLoadReader(), 0.0
        self.restart()

    def restart(self) -> None:
        """Forget everything since the last logged step."""
        self._begin()
        self.is_partial = True  # not all of the time since the last row belongs to complete steps

    def _begin(self) -> None:
        self._waited_for_data_s = 0.0
        self._excluded = HostLoad()
        self._start = self._reader.read()

    def begin_data(self) -> None:
        """Called before the data of a step is loaded."""
        self._waited_s = host_waited_s()

    def end_data(self) -> None:
        """Called after it: in this time the rank may have waited for others, too."""
        self._waited_for_data_s += host_waited_s() - self._waited_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what the host counts inside of this context, which is outside of training steps."""
        start = self._reader.read()
        try:
            yield
        finally:
            self._excluded = self._excluded.plus(self._reader.read().since(start))

    def take(self, steps: int, *, data_seconds: float) -> list[float]:
        """Return the values of TIMES and LOAD of a step, and begin again. The phases were taken just before.

        Args:
            steps: number of steps since the last logged one.
            data_seconds: time of loading data in them.
        """
        waited, data = self._phases.waited_ms, (data_seconds - self._waited_for_data_s) * 1e3
        own = {phase: taken - waited[phase] for phase, taken in self._phases.taken_ms.items()}
        times = {"data": data, "forward": own[FORWARD] + own[WAIT], "backward": own[BACKWARD] + own[REDUCE],
                 "reduce_wait": sum(waited.values()), "optimizer": own[OPTIMIZER],
                 "other": max(own[OTHER] - data, 0.0), "own": sum(own.values())}
        load = self._reader.read().since(self._start).since(self._excluded)
        values = [*(times[key] for key in TIMES), *load]
        self._begin()
        self.is_partial = False
        return [value / steps for value in values]


class _Measured:
    """Timers and sum of the waits of this process."""

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


class HostLoad(NamedTuple):
    """Counters since the start of the thread or of the host; differences are those of an interval."""

    cpu_ms: float = 0.0  # computed
    run_delay_ms: float = 0.0  # ready to run, while other threads had the CPU
    throttled_ms: float = 0.0  # in which the control group was over its CPU quota
    read_bytes: float = 0.0  # bytes that this process has read from a disk
    gpu_slowed: float = 0.0  # readings at which the GPU ran below its clock because of heat or power

    def since(self, earlier: "HostLoad") -> "HostLoad":
        return HostLoad(*(now - before for now, before in zip(self, earlier, strict=True)))

    def plus(self, other: "HostLoad") -> "HostLoad":
        return HostLoad(*(a + b for a, b in zip(self, other, strict=True)))


class HostLoadReader:
    """Reads the counters. A counter that this host does not have remains 0."""

    def __init__(self) -> None:
        self._throttled: dict[Path, float] = {}  # newest value of each control group
        self._throttled_ms = self._gpu_slowed = 0.0

    def read(self) -> HostLoad:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        self._gpu_slowed += _gpu_is_slowed()
        return HostLoad(cpu_ms=(usage.ru_utime + usage.ru_stime) * 1e3, run_delay_ms=_run_delay_ms(),
                        throttled_ms=self._throttled_now(), read_bytes=_read_bytes(), gpu_slowed=self._gpu_slowed)

    def _throttled_now(self) -> float:
        """Return the time since the first read in which the control groups of this process were throttled.

        A quota may be set later, and the process may be moved to another group: only what grows between two reads of
        the same group counts.
        """
        found = {path: _throttled_ms(path) for path in _quota_files()}
        self._throttled_ms += max((now - self._throttled.get(path, now) for path, now in found.items()), default=0.0)
        self._throttled |= found
        return self._throttled_ms


def _run_delay_ms() -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_text(Path("/proc/thread-self/schedstat")).split()[1]) / 1e6  # proc(5): nanoseconds
    return 0.0


def _read_bytes() -> float:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return float(_fields(Path("/proc/self/io"))["read_bytes:"])
    return 0.0


def _throttled_ms(quota: Path) -> float:
    """Return the time in which a control group was throttled: throttled_usec of version 2, throttled_time of 1 (ns)."""
    with contextlib.suppress(OSError, ValueError):
        fields = _fields(quota)
        return int(fields.get("throttled_usec", 0)) / 1e3 + int(fields.get("throttled_time", 0)) / 1e6
    return 0.0


def _quota_files() -> list[Path]:
    """Return the cpu.stat of this process's control group and of the groups around it, of versions 1 and 2."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in _text(Path("/proc/self/cgroup")).splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = Path(name.lstrip("/"))
            for root in _ROOTS_V1 if controllers else _ROOTS_V2:
                # ".." is the name of a group outside of a container
                found += [Path(root) / each / "cpu.stat" for each in (group, *group.parents) if ".." not in each.parts]
    return found


def _fields(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in _text(path).splitlines())


def _text(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # half the time of Path.read_text
    try:
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def _gpu_is_slowed() -> bool:
    """Return whether this rank's GPU runs below its clock now because of heat or power; False if it cannot be known."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    with contextlib.suppress(Exception):  # NVML has errors of its own, and torch's helper is not public
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        handle = torch.cuda._get_pynvml_handler(torch.cuda.current_device())
        return bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & _SLOWDOWNS)
    return False
