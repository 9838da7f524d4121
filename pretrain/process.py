"""This process's memory, and what the ones that it starts need."""

import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def resident_bytes() -> tuple[int, int]:
    """(now, highest) resident set of this process: VmRSS and VmHWM of proc(5)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        values = dict(line.split(":", 1) for line in file)
    now, highest = (int(values[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, highest


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def package_environment() -> dict[str, str]:
    """This process's environment, for one that imports this package wherever it runs: the same checkout first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}
