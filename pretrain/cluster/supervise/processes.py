"""Processes of a run: those below this one, and the ranks of a run on this host.

`python -m pretrain.cluster.supervise.processes list|save|end CWD WORDS...` does the latter on another host, over ssh.
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


def adopt_orphans() -> None:
    """From now on processes whose parent ends become this one's children: a launcher that is killed hides no rank."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All processes below this one, but for background writers: they end what they write, and then themselves."""
    return [process for process in psutil.Process().children(recursive=True) if WRITER_MODULE not in _words(process)]


def ranks_of(identity: Sequence[str], cwd: str) -> list[psutil.Process]:
    """This host's ranks of the run that was started in `cwd` with the flags `identity`; none for no flags."""
    ours = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    return [process for process in psutil.process_iter() if identity and process.pid not in ours
            and _is_rank(process, identity, cwd)]


def _is_rank(process: psutil.Process, identity: Sequence[str], cwd: str) -> bool:
    words, length = _words(process), len(identity)
    if not words or "python" not in os.path.basename(words[0]):
        return False
    if not any(words[at:at + length] == list(identity) for at in range(len(words) - length + 1)):
        return False
    with contextlib.suppress(psutil.Error, OSError):
        environ = process.environ()
        return any(name in environ for name in RANK_VARIABLES) and process.cwd() == cwd
    return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.Error, OSError):
        return []


def ask_to_save(processes: Sequence[psutil.Process]) -> list[int]:
    """SIGUSR1 to those that listen for it; their process ids. Others would die of it: DeepSpeed's launcher, a shell."""
    asked = []
    for process in processes:
        if _listens(process.pid):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
                asked.append(process.pid)
    return asked


def _listens(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def end(processes: Sequence[psutil.Process], *, grace_s: float) -> list[psutil.Process]:
    """SIGTERM, and after `grace_s` seconds SIGKILL. Returns those that are still there (a host's disk may hang)."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return psutil.wait_procs(alive, timeout=10)[1] if alive else []


def end_descendants(*, grace_s: float) -> None:
    """End all processes below this one, those too that appear meanwhile."""
    while processes := descendants():
        if end(processes, grace_s=grace_s):
            return
        grace_s = 0.0


def main(action: str, cwd: str, identity: Sequence[str]) -> int:
    """Act on this host's ranks of a run, and print the process ids concerned."""
    found = ranks_of(identity, cwd)
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
