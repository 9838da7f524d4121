"""Functions that run on each host: collect facts before a run; find, signal and end its processes.

`remote.py` sends the source of this file and of distributed/host.py to each host's Python. A host without this package
can therefore answer, too. These two files may import only each other, psutil and the standard library.
"""

import contextlib
import hashlib
import os
import platform
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from pretrain.distributed.host import RANK_VARIABLES, interface_towards

JOB_VARIABLE = "DS_PRETRAIN_JOB"  # environment variable of every process of one start; its value is the job's name
_HASHED_BYTES = 2**20  # bytes at the beginning and at the end of a file that are hashed


def host_facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `preflight.HostFacts`. `request`: see `preflight.PreflightRequest.to_json`."""
    root, run = Path(request["root"]), request["run"]
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in request["packages"]},
        "has_folder": os.path.isdir(request["folder"]),
        "code_version": _code_version(root),
        "code_digest": _code_digest(root),
        "commit": _commit(root),
        "files": {name: _fingerprint(Path(name)) for name in request["files"]},
        "run_problem": _run_folder_problem(Path(run), request["token"]) if run else "",
        "interface": interface_towards(request["peer"]) if request["peer"] else None,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _code_version(root: Path) -> str | None:
    """Return the version of the package, or None without one. An editable installation's metadata may be older."""
    try:
        text = (root / "pretrain" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


def _code_digest(root: Path) -> str | None:
    """Return a hash of all Python files of the package, or None if there are none.

    The commit is not enough: checkouts of the same commit may have different uncommitted changes.
    """
    digest = hashlib.sha256()
    files = sorted((root / "pretrain").rglob("*.py"))
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12] if files else None


def _commit(root: Path) -> str | None:
    """Return the commit of a checkout; None for an installed package, or if git does not know it."""
    git = ["git", "-c", "safe.directory=*", "-C", str(root)]
    try:  # an environment with the installed package may lie in a repository of something else
        subprocess.run([*git, "ls-files", "--error-unmatch", "pretrain/__init__.py"], capture_output=True, check=True,
                       timeout=5)
        return subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True,
                              timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _fingerprint(path: Path) -> list[Any] | None:
    """Return [size in bytes, hash of both ends] of a file, or [0, hash of the file names] of a folder.

    Returns None if `path` does not exist or cannot be read.
    """
    try:
        if path.is_dir():
            return [0, hashlib.sha256("\0".join(sorted(os.listdir(path))).encode()).hexdigest()[:12]]
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(_HASHED_BYTES))
            file.seek(max(size - _HASHED_BYTES, 0))
            digest.update(file.read(_HASHED_BYTES))
        return [size, digest.hexdigest()[:12]]
    except OSError:
        return None


def _run_folder_problem(run: Path, token: str) -> str:
    """Return why this host does not share the run folder or cannot write there, or "" if all is well.

    `token`: name of a file that the launching host has created in the run folder.
    """
    if not (run / token).is_file():
        return "is a different folder on this host" if run.is_dir() else "does not exist on this host"
    own_file = run / f"{token}-{os.getpid()}"
    try:
        own_file.write_text(socket.gethostname())
        own_file.unlink()
    except OSError as error:
        return f"cannot be written on this host ({error.strerror})"
    return ""


def processes_of_job(job: str) -> list[psutil.Process]:
    """Return all processes of `job` on this host except this process."""
    return [process for process in psutil.process_iter()
            if process.pid != os.getpid() and _environment(process).get(JOB_VARIABLE) == job]


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the variables of a process; {} if it has ended, or belongs to another user."""
    with contextlib.suppress(psutil.Error, OSError):
        return dict(process.environ())
    return {}


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of the command line; [] if the process has ended, or cannot be read."""
    with contextlib.suppress(psutil.Error, OSError):
        return list(process.cmdline())
    return []


def end_job(job: str, patience_s: float) -> list[int]:
    """Wait up to `patience_s` until all processes of `job` on this host have ended, then end the remaining ones.

    Returns the process ids of the remaining ones.
    """
    deadline = time.monotonic() + patience_s
    while (remaining := processes_of_job(job)) and time.monotonic() < deadline:
        time.sleep(0.2)
    end_all(lambda: processes_of_job(job), grace_s=5.0)
    return [process.pid for process in remaining]


def signal_ranks(job: str, number: int) -> list[int]:
    """Send a signal to the ranks of `job` on this host that can save, but not to their children. Returns their ids."""
    # Ranks, and their children: these inherit the variables.
    candidates = [process for process in processes_of_job(job)
                  if any(name in _environment(process) for name in RANK_VARIABLES)]
    pids = {process.pid for process in candidates}
    return ask_to_save([process for process in candidates if _parent(process) not in pids], number)


def _parent(process: psutil.Process) -> int:
    """Return the process id of the parent, or 0 if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return 0


def ranks_of_run(action: str, folder: str, flags: list[str]) -> list[int]:
    """Return the process ids of the run's ranks on this host. "save" and "end" also signal them; "list" does not.

    `folder`, `flags`: see `find_ranks`. With "save", only the ranks that can save are returned.
    """
    found = find_ranks(folder, flags)
    if action == "save":
        return ask_to_save(found)
    if action == "end":
        end(found, grace_s=5.0)
    return [process.pid for process in found]


def find_ranks(folder: str, flags: Sequence[str]) -> list[psutil.Process]:
    """Return the ranks on this host of the run that was started in `folder` with these flags of train.py."""
    own = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    return [process for process in psutil.process_iter()
            if process.pid not in own and _is_rank(process, folder, list(flags))]


def _is_rank(process: psutil.Process, folder: str, flags: list[str]) -> bool:
    """Return whether the process is a Python process with these flags, the variables of a rank and this folder."""
    words, length = command_line(process), len(flags)
    if not words or "python" not in os.path.basename(words[0]):
        return False
    if not any(words[at:at + length] == flags for at in range(len(words) - length + 1)):
        return False
    with contextlib.suppress(psutil.Error, OSError):
        return any(name in _environment(process) for name in RANK_VARIABLES) and process.cwd() == folder
    return False


def can_save(pid: int) -> bool:
    """Return whether the process handles SIGUSR1: ranks do so from the time when they can save."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


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


def end_all(find: Callable[[], list[psutil.Process]], *, grace_s: float) -> None:
    """End all processes that `find` returns, including processes that start in the meantime.

    These get no time after SIGTERM. If a process cannot be ended, this function gives up.
    """
    while processes := find():
        if end(processes, grace_s=grace_s):
            return
        grace_s = 0.0
