"""Find, signal and end the processes of a run on this host.

`python -m pretrain.cluster.supervise.processes list|save|end FOLDER WORDS...` does so for the ranks of a run. The
supervisor calls it over ssh.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

import psutil

from pretrain.checkpoint.save.background import WRITER_MODULE
from pretrain.distributed.host import RANK_VARIABLES

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def become_subreaper() -> None:
    """Become a subreaper, so that ranks whose launcher is killed stay visible as descendants of this process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Return all descendants of this process, except checkpoint writers: these end when their file is complete."""
    return [process for process in psutil.Process().children(recursive=True)
            if WRITER_MODULE not in _command_line(process)]


def ranks_of(identity: Sequence[str], folder: str) -> list[psutil.Process]:
    """Return this host's ranks of the run that was started in `folder` with the flags `identity`; [] for no flags."""
    own = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    return [process for process in psutil.process_iter() if identity and process.pid not in own
            and _is_rank(process, identity, folder)]


def _is_rank(process: psutil.Process, identity: Sequence[str], folder: str) -> bool:
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
    try:
        return list(process.cmdline())
    except (psutil.Error, OSError):
        return []


def ask_to_save(processes: Sequence[psutil.Process]) -> list[int]:
    """Send SIGUSR1 to the processes that handle it, and return their ids. It would kill a launcher or a shell."""
    asked = []
    for process in processes:
        if _handles_sigusr1(process.pid):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
                asked.append(process.pid)
    return asked


def _handles_sigusr1(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def end(processes: Sequence[psutil.Process], *, grace_s: float) -> list[psutil.Process]:
    """Send SIGTERM, and SIGKILL after `grace_s`. Returns processes that still exist, for example blocked by a disk."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return psutil.wait_procs(alive, timeout=10)[1] if alive else []


def end_descendants(*, grace_s: float) -> None:
    """End all descendants of this process, including those that start in the meantime."""
    while processes := descendants():
        if end(processes, grace_s=grace_s):
            return
        grace_s = 0.0


def main(action: str, folder: str, identity: Sequence[str]) -> int:
    """List, ask to save, or end this host's ranks of a run, and print their process ids."""
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
