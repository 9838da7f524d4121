"""Find, signal and end the processes of a run, on this host and on others.

`ranks_on` runs this module on other hosts by ssh, to list, signal or end the ranks of a run:

    python -m pretrain.cluster.supervise.processes list|save|end FOLDER FLAGS...

FOLDER is the working folder of the run, and FLAGS are its flags of train.py.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence

import psutil

from pretrain.checkpoint.save.background import WRITER_MODULE
from pretrain.cluster.hosts.probe import can_save
from pretrain.cluster.hosts.remote import Transport, call_on_all, run_in_this_folder
from pretrain.distributed.host import RANK_VARIABLES
from pretrain.distributed.process import ROOT

_PR_SET_CHILD_SUBREAPER = 36  # option of prctl(2)
_REMOTE_TIMEOUT_S = 60.0  # for the connection and the command together


def become_subreaper() -> None:
    """Become a subreaper: if a launcher is killed, its ranks become children of this process, not of init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(command: int) -> None:
    """Collect orphans that this subreaper has adopted and that have ended; `command` is the child that it waits for.

    Otherwise they remain as zombies. After a crash, DeepSpeed's launcher waits 30 s for a zombie among the descendants
    of its ranks (launcher/launch.py, terminate_process_tree, 0.19.8).
    """
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != command and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def descendants() -> list[psutil.Process]:
    """Return all descendants of this process except checkpoint writers, which end by themselves after their save."""
    return [process for process in psutil.Process().children(recursive=True)
            if WRITER_MODULE not in _command_line(process)]


def ranks_run() -> bool:
    """Return whether ranks that can save are among the descendants. Those of a killed launcher save, and then end."""
    return any(can_save(process.pid) for process in descendants())


def ranks_of(identity: Sequence[str], folder: str) -> list[psutil.Process]:
    """Return the ranks on this host of the run that was started in `folder` with the flags `identity`.

    Returns [] if `identity` is empty.
    """
    if not identity:
        return []
    own = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    return [process for process in psutil.process_iter()
            if process.pid not in own and _is_rank(process, identity, folder)]


def _is_rank(process: psutil.Process, identity: Sequence[str], folder: str) -> bool:
    """Return whether the process is a Python process with these flags, the variables of a rank and this folder."""
    words, length = _command_line(process), len(identity)
    if not words or "python" not in os.path.basename(words[0]):
        return False
    if not any(words[at:at + length] == list(identity) for at in range(len(words) - length + 1)):
        return False
    with contextlib.suppress(psutil.Error, OSError):
        environ = process.environ()
        return any(name in environ for name in RANK_VARIABLES) and process.cwd() == folder
    return False


def _command_line(process: psutil.Process) -> list[str]:
    """Return the words of the command line, or [] if the process has ended or cannot be read."""
    try:
        return list(process.cmdline())
    except (psutil.Error, OSError):
        return []


def ask_to_save(processes: Sequence[psutil.Process], number: int = signal.SIGUSR1) -> list[int]:
    """Send a signal to the processes that handle SIGUSR1, and return their ids.

    Only ranks that can save handle SIGUSR1, and launchers that pass it on to ranks. It would kill other processes.
    """
    asked = []
    for process in processes:
        if can_save(process.pid):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
                asked.append(process.pid)
    return asked


def end(processes: Sequence[psutil.Process], *, grace_s: float) -> list[psutil.Process]:
    """Send SIGTERM, and SIGKILL to processes that still run after `grace_s`.

    Returns the processes that exist 10 s later, for example because they wait for a disk.
    """
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return psutil.wait_procs(alive, timeout=10)[1] if alive else []


def end_descendants(*, grace_s: float) -> None:
    """End all descendants of this process, including descendants that start in the meantime.

    New descendants get no time after SIGTERM. If a process cannot be ended, this function gives up.
    """
    while processes := descendants():
        if end(processes, grace_s=grace_s):
            return
        grace_s = 0.0


def ranks_on(hosts: Iterable[str], action: str, identity: Sequence[str],
             transport: Transport) -> dict[str, list[int]]:
    """List, signal or end the run's ranks on the hosts. Returns host -> process ids, for the hosts with such ranks.

    Hosts that do not answer are left out. Their ranks end when their collectives time out.

    Args:
        hosts: hosts to ask.
        action: "list", "save" (ask the ranks to save and stop) or "end".
        identity: see `launch_command.identity`; with [] nothing is done.
        transport: runs a command on a host.
    """
    if not identity:
        return {}
    words = [sys.executable, "-m", "pretrain.cluster.supervise.processes", action, os.getcwd(), *identity]
    command = f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.join(words)}"
    answers = call_on_all(hosts, lambda host: run_in_this_folder(host, command, transport, _REMOTE_TIMEOUT_S))
    return {host: [int(pid) for pid in answer.split()] for host, answer in answers.items()
            if isinstance(answer, str) and answer.split()}


def main(action: str, folder: str, identity: Sequence[str]) -> int:
    """Print the process ids of the run's ranks on this host. `action`: "save" and "end" also signal these ranks."""
    found = ranks_of(identity, folder)
    if action == "save":
        pids = ask_to_save(found)
    else:
        pids = [process.pid for process in found]
        if action == "end":
            end(found, grace_s=5.0)
    print(*pids)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
