"""State and start time of processes, and the namespace of their ids, from /proc. Imports only the standard library."""

import contextlib
import os
from pathlib import Path

ENDED = ("Z", "X", "")  # states of a process that does not run any more; "": there is no such process
STOPPED = ("T", "t")  # states of a process after SIGSTOP, and under a debugger


def state_and_start(pid: int) -> tuple[str, int]:
    """Return the state (one letter) and the start time in clock ticks since boot: proc_pid_stat(5). Raises OSError.

    The start time identifies the process: a later process may have the same id.
    """
    values = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return values[0], int(values[19])


def process_state(pid: int) -> str:
    """Return the state of a process, or "" if there is none."""
    with contextlib.suppress(OSError):
        return state_and_start(pid)[0]
    return ""


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if there is none."""
    with contextlib.suppress(OSError):
        return state_and_start(pid)[1]
    return None


def boot_id() -> str:
    """Return an identifier of this boot of the kernel, or "" if it is unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def pid_namespace() -> int:
    """Return the number of this process's PID namespace, or 0 if it is unknown.

    Containers on one host have the same boot id, but each has its own process ids.
    """
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
