"""Print one line per host, after all other output: why a run is rejected, or that another rank has ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from pretrain.distributed.equal_ranks import announce_rejection
from pretrain.distributed.world import ALONE, World, running_environment
from pretrain.errors import ConfigError, escape_controls
from pretrain.terminal import clear_status

_ENDED_WITHIN_S = 5.0  # time in which a launcher ends the other ranks after one has failed
_ENDED_BY_DEEPSPEED_WITHIN_S = 30.0  # longer, because on a busy machine the first rank may be far behind
_DEEPSPEED_LAUNCHER = "deepspeed.launcher.launch"
# A program that waits for the end of a process, at most 60 s, then prints a line. DeepSpeed's launcher gives each rank
# 30 s to end.
_PRINT_AFTER = """
import os, select, sys
ended = select.poll()
ended.register(int(sys.argv[1]), select.POLLIN)
ended.poll(60_000)
os.write(2, os.fsencode(sys.argv[2] + "\\n"))
"""
# text of the errors of gloo (transport/tcp/pair.cc), NCCL and the TCP store, of torch 2.13
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
                    "Connection was likely closed", "remote process exited or there was a network error",
                    "NCCL communicator was aborted")
_SEEN_WITHIN_S = 5.0  # a launcher looks for failed ranks about once per second


def run_or_reject(run: Callable[[World], int]) -> int:
    """Run a program on this rank. Returns its exit code; a ConfigError is printed, and gives its own."""
    world = ALONE
    try:
        world = running_environment()
        return run(world)
    except ConfigError as error:
        print_error(world, error)
        announce_rejection(world, error)
        return error.exit_code


def print_error(world: World, error: Exception) -> None:
    """Print why the run is rejected, once per host, because hosts may have different errors.

    The first rank of each host prints. The other ranks wait, because launchers end all ranks after one has failed. A
    rank that still runs after the wait prints its own error, because the first rank does not have this error.
    """
    launcher = _deepspeed_launcher()
    host = f"{socket.gethostname()}: " if world.rank != 0 else ""
    if world.local_rank != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's signal ends the wait; nothing is saved any more
        time.sleep(_ENDED_BY_DEEPSPEED_WITHIN_S if launcher else _ENDED_WITHIN_S)
        if not (launcher or _ends_all(world)):  # srun, for example: each rank would print the same error
            return
        host = f"rank {world.rank} on {host}"
    details = error.details if isinstance(error, ConfigError) else ""
    line = escape_controls(f"{details}ds-pretrain: error: {host}{error}")
    clear_status()
    if launcher is None or not _print_after(launcher, line):
        print(line, file=sys.stderr, flush=True)


def _ends_all(world: World) -> bool:
    """Return whether the launcher (torchrun or an MPI launcher) ends the other ranks when one has failed."""
    return "TORCHELASTIC_RUN_ID" in os.environ or world.launcher in ("openmpi", "pmi", "mpi")


def _deepspeed_launcher() -> psutil.Process | None:
    """Return the process of DeepSpeed's launcher on this host if it started this process, else None."""
    try:
        launcher = psutil.Process().parent()
        return launcher if launcher is not None and _DEEPSPEED_LAUNCHER in launcher.cmdline() else None
    except psutil.Error:
        return None


def _print_after(launcher: psutil.Process, line: str) -> bool:
    """Print `line` after the log lines that DeepSpeed's launcher writes about a failed rank.

    A separate process waits for the end of the launcher, then prints. The launcher ends after its log lines. The
    `deepspeed` command waits for the launcher, and ends long after the separate process has printed (DeepSpeed 0.19.8:
    launcher/launch.py, sigkill_handler; launcher/runner.py, main).

    Returns False and does nothing if the launcher logs nothing, or if the system has no pidfd_open.
    """
    try:
        if "--log_level=critical" in launcher.cmdline():
            return False
        descriptor = os.pidfd_open(launcher.pid)
        subprocess.Popen([sys.executable, "-I", "-S", "-c", _PRINT_AFTER, str(descriptor), line],
                         pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         start_new_session=True)
    except (psutil.Error, OSError, AttributeError):  # no pidfd_open: an old kernel, or not Linux
        return False
    return True


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank has ended or cannot be reached."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_CONNECTION)


def report_lost_connection(world: World, error: BaseException) -> None:
    """Print one line per host instead of a traceback, and give the launcher time to see the other rank's exit code.

    The other rank's error is the cause, and must stay the last one.
    """
    if world.local_rank == 0:
        reason = next(text for text in _LOST_CONNECTION if text in str(error))
        clear_status()
        print(f"ds-pretrain: rank {world.rank} on {socket.gethostname()} lost the connection to another rank "
              f"({reason}). The cause is in the output of that rank.", file=sys.stderr, flush=True)
    time.sleep(_SEEN_WITHIN_S)
