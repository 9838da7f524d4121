"""Code that runs on each host before and after a run.

Only the standard library, psutil and distributed/host.py: `remote.py` sends the text of both files to each host's
Python, so that a host without this checkout can still answer.
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

JOB_VARIABLE = "DS_PRETRAIN_JOB"  # its value marks every process of one start
_HASHED_BYTES = 2**20  # at either end of a file


def examine(request: dict[str, Any]) -> dict[str, Any]:
    """This host's facts: versions, code, files, run folder, interface towards `request["peer"]`, devices."""
    root = Path(request["root"])
    return {
        "host_name": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in request["packages"]},
        "folder": os.path.isdir(request["folder"]),
        "code": _code_digest(root),
        "commit": _commit(root),
        "files": {name: _fingerprint(Path(name)) for name in request["files"]},
        "run": _examine_run(Path(request["run"]), request["token"]),
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
    """Of every Python file of the package: two checkouts of one commit may differ by what is not committed."""
    digest = hashlib.sha256()
    files = sorted((root / "pretrain").rglob("*.py"))
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12] if files else None


def _commit(root: Path) -> str | None:
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _fingerprint(path: Path) -> list[Any] | None:
    """[bytes, hash of both ends], or None for what is not there. A folder: of its files' names."""
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


def _examine_run(run: Path, token: str) -> str:
    """"" where `run` is the folder in which the launching host wrote `token`, and writable; else what is wrong."""
    if not (run / token).is_file():
        return "another folder" if run.is_dir() else "no such folder"
    own = run / f"{token}-{os.getpid()}"
    try:
        own.write_text(socket.gethostname())
        own.unlink()
    except OSError as error:
        return f"a folder that cannot be written ({error.strerror})"
    return ""


def processes_of(job: str) -> dict[int, dict[str, str]]:
    """Process id -> environment of every process of this host that belongs to `job`, this one aside."""
    mark, found = f"{JOB_VARIABLE}={job}", {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended, or is not ours
            continue
        if mark in words and int(folder.name) != os.getpid():
            found[int(folder.name)] = dict(word.partition("=")[::2] for word in words)
    return found


def end_job(job: str, patience_s: float, kill_after_s: float = 5.0) -> list[int]:
    """End what belongs to `job` on this host: after `patience_s` by SIGTERM, `kill_after_s` later by SIGKILL.

    Returns the processes that did not end by themselves.
    """
    _wait_until_none(job, patience_s)
    left = sorted(processes_of(job))
    for number, wait_s in ((signal.SIGTERM, kill_after_s), (signal.SIGKILL, 5.0)):
        for process in processes_of(job):
            _signal(process, number)
        _wait_until_none(job, wait_s)
    return left


def signal_ranks(job: str, number: int) -> list[int]:
    """Send a signal to the ranks of `job` on this host (not to what they started). Returns their process ids."""
    ranks = {process for process, environ in processes_of(job).items()
             if any(name in environ for name in RANK_VARIABLES)}
    first = sorted(process for process in ranks if _parent(process) not in ranks)
    for process in first:
        _signal(process, number)
    return first


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _wait_until_none(job: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and processes_of(job):
        time.sleep(0.2)


def answer(question: str, *words: Any) -> None:
    """Print the JSON of `examine`, `end_job` or `signal_ranks`: what `remote.ask` reads."""
    functions: dict[str, Any] = {"examine": examine, "end_job": end_job, "signal_ranks": signal_ranks}
    print(json.dumps(functions[question](*words)), flush=True)
