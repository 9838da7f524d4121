"""What slows this thread down on its host: counters of the kernel, and of NVIDIA's driver. A read takes 0.15 ms.

All counters are those of the thread that calls `read`, which executes the training steps, except for the throttling of
its control group.
"""

import contextlib
import os
import resource
from pathlib import Path
from typing import NamedTuple

import torch

# bits of NVML's clocks event reasons that slow a GPU down without the user's wish: software and hardware thermal
# slowdown, hardware slowdown, power brake (nvml.h, nvmlClocksEventReason*, nvmlClocksThrottleReason*)
_ROOTS_V1, _ROOTS_V2 = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"), ("/sys/fs/cgroup",)
_SLOWDOWNS = 0x20 | 0x40 | 0x08 | 0x80


class HostLoad(NamedTuple):
    """Counters since the start of the thread or of the host; differences are those of an interval."""

    cpu_ms: float = 0.0  # computed
    run_delay_ms: float = 0.0  # ready to run, while other threads had the CPU
    throttled_ms: float = 0.0  # in which the control group was over its CPU quota
    read_bytes: float = 0.0  # of this process, that came from a disk
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
