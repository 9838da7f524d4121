"""This host's processes and network interfaces, and the variables by which launchers number ranks.

Imports only the standard library and psutil: cluster/hosts/remote.py sends this file's text to other hosts, and the
process that watches a rank (resilience/watcher.py) stays small.
"""

import contextlib
import os
import socket
from pathlib import Path

# (rank, world size, local rank, local world size) as each launcher names them, in order of precedence
LAUNCHER_VARIABLES = {
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
RANK_VARIABLES = tuple(names[0] for names in LAUNCHER_VARIABLES.values())
# variables that a launcher must not pass on to the ranks that another launcher starts for it
RANK_OF_SHELL = frozenset({*(name for names in LAUNCHER_VARIABLES.values() for name in names), "PMIX_RANK",
                           "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
                           "CROSS_RANK"} - {"SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE"})
ENDED = ("Z", "X", "")  # states of a process that does not run any more; "": there is no such process
STOPPED = ("T", "t")  # states of a process after SIGSTOP, and under a debugger


def interface_towards(address: str) -> tuple[str, str] | None:
    """Return (name, address) of the network interface that reaches or owns `address`.

    Return None for the loopback interface, and if `address` cannot be resolved or reached.
    """
    import psutil

    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket: this sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if source in [entry.address.split("%")[0] for entry in addresses] and name != "lo":
            return name, source
    return None


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


def is_running(pid: int, started: int) -> bool | None:
    """Return whether the process that started at `started` (see `start_time`) still runs; None if that is unknown."""
    try:
        state, start = state_and_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # such as too many open files
        return None
    return start == started and state not in ENDED


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
