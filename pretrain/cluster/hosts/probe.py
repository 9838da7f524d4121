"""Functions that run on each host: collect facts before a run, signal its ranks, and end its processes.

`remote.py` sends the source of this file and of distributed/host.py to each host's Python. A host without this checkout
can therefore answer, too. These two files may import only each other, psutil and the standard library.
"""

import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pretrain.distributed.host import RANK_VARIABLES, interface_towards

JOB_VARIABLE = "DS_PRETRAIN_JOB"  # environment variable of every process of one start; its value is the job's name
_HASHED_BYTES = 2**20  # bytes at the beginning and at the end of a file that are hashed


def host_facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `preflight.HostFacts`. `request`: see `preflight.PreflightRequest.to_json`."""
    root = Path(request["root"])
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in request["packages"]},
        "has_folder": os.path.isdir(request["folder"]),
        "code_digest": _code_digest(root),
        "commit": _commit(root),
        "files": {name: _fingerprint(Path(name)) for name in request["files"]},
        "run_problem": _run_folder_problem(Path(request["run"]), request["token"]),
        "interface": interface_towards(request["peer"]) if request["peer"] else None,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


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
    """Return the commit of the checkout, or None if git does not know it."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
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


def processes_of_job(job: str) -> dict[int, dict[str, str]]:
    """Return process id -> environment variables, for all processes of `job` on this host except this process."""
    mark, found = f"{JOB_VARIABLE}={job}", {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if mark in words and int(folder.name) != os.getpid():
            found[int(folder.name)] = dict(word.partition("=")[::2] for word in words)
    return found


def end_job(job: str, patience_s: float, kill_after_s: float = 5.0) -> list[int]:
    """Wait up to `patience_s` until all processes of `job` on this host have ended, then end the remaining ones.

    They get SIGTERM, and SIGKILL up to `kill_after_s` later. Returns their process ids.
    """
    _wait_until_job_ended(job, patience_s)
    remaining = sorted(processes_of_job(job))
    for number, wait_s in ((signal.SIGTERM, kill_after_s), (signal.SIGKILL, 5.0)):
        for process in processes_of_job(job):
            _send_signal(process, number)
        _wait_until_job_ended(job, wait_s)
    return remaining


def signal_ranks(job: str, number: int) -> list[int]:
    """Send a signal to the ranks of `job` on this host that can save, but not to their children. Returns their ids."""
    # Ranks, and their children: these inherit the variables.
    candidates = {process for process, environ in processes_of_job(job).items()
                  if any(name in environ for name in RANK_VARIABLES)}
    ranks = sorted(process for process in candidates if _parent(process) not in candidates and can_save(process))
    for process in ranks:
        _send_signal(process, number)
    return ranks


def can_save(process: int) -> bool:
    """Return whether the process handles SIGUSR1: ranks do so from the time when they can save."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def _parent(process: int) -> int:
    """Return the process id of the parent, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def _send_signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _wait_until_job_ended(job: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and processes_of_job(job):
        time.sleep(0.2)


def call(function: str, *args: Any) -> None:
    """Call the function named `function`, and print its result as one line of JSON for `remote.call_probe`."""
    functions: dict[str, Any] = {"host_facts": host_facts, "end_job": end_job, "signal_ranks": signal_ranks}
    print(json.dumps(functions[function](*args)), flush=True)
