"""The background process of one rank: writes snapshots, commits, prunes and mirrors, beside the training process.

It imports neither torch nor DeepSpeed, talks to its training process in lines of JSON (a `Job` in, replies out), and
to the writers of other ranks through files alone. When the training process dies, even by SIGKILL, it ends what it was
told to do and exits: a checkpoint whose snapshot was taken is not lost.
"""

import contextlib
import fcntl
import json
import mmap
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.commit import SaveError, commit, write_part
from pretrain.checkpoint.files import FileRecord, HashedFile
from pretrain.checkpoint.manifest import Manifest
from pretrain.checkpoint.mirror import finish_upload, upload
from pretrain.checkpoint.retention import prune
from pretrain.checkpoint.snapshot import Region

_REPLY_LOCK = threading.Lock()  # the writing thread and the one of `_after` both reply
_LOCK = ".writer-{:05d}.lock"


@dataclass(frozen=True)
class After:
    """What comes when a checkpoint is committed."""

    keep_checkpoints: int = 0
    keep_every: int = 0
    keep_best: int = 0
    mirror: str | None = None


@dataclass(frozen=True)
class Job:
    """One checkpoint as one rank's writer sees it. Paths are absolute."""

    step: int
    temporary: str
    final: str
    rank: int
    world_size: int
    save_id: str
    timeout_s: float
    files: list[Region]  # in the snapshot; none: the training process has written them
    names: list[str]  # of the files of this rank
    error: str | None  # the training process could not make its files
    manifest: str | None  # rank 0's, without files
    after: After
    committed: bool  # only what comes after is left to do


def main(descriptor: int, checkpoints: Path, rank: int) -> None:
    """Work until the training process closes our standard input."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock = open(checkpoints / _LOCK.format(rank), "w", encoding="utf-8")  # noqa: SIM115 (held until the end)
    _lock(lock.fileno(), wait=True)
    verified: set[str] = set()
    with ThreadPoolExecutor(max_workers=1) as after:  # a slow mirror does not hold up the next save
        for line in sys.stdin:
            job = _read_job(line)
            if not job.committed:
                reply = _save(job, descriptor)
                _reply(reply)
                if reply["event"] != "save":
                    continue
            after.submit(_after, job, verified)


def _read_job(line: str) -> Job:
    values = json.loads(line)
    return Job(**{**values, "files": [Region(*file) for file in values["files"]], "after": After(**values["after"])})


def _reply(reply: dict[str, Any]) -> None:
    with _REPLY_LOCK, contextlib.suppress(OSError):  # nobody may listen any more
        os.write(1, json.dumps(reply).encode() + b"\n")


def _save(job: Job, descriptor: int) -> dict[str, Any]:
    """Write this rank's files and, on rank 0, commit when every rank's are there."""
    start = time.perf_counter()
    temporary = Path(job.temporary)
    records, error = ({}, job.error) if job.error else _write_files(job, descriptor)
    try:
        if error is not None:
            give_up(job, error)
        else:
            write_part(temporary, rank=job.rank, save_id=job.save_id, files=records)
        if job.manifest is not None:
            commit(temporary, save_id=job.save_id, world_size=job.world_size,
                   manifest=Manifest.from_json(job.manifest), timeout_s=job.timeout_s)
    except (SaveError, OSError) as failure:
        error = str(failure)
    if error is not None:
        return {"event": "save_failed", "step": job.step, "reason": error}
    return {"event": "save", "step": job.step, "path": job.final, "seconds": round(time.perf_counter() - start, 3)}


def _write_files(job: Job, descriptor: int) -> tuple[dict[str, FileRecord], str | None]:
    """(what was written, what went wrong)."""
    records: dict[str, FileRecord] = {}
    error: str | None = None
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    try:
        for region in job.files:
            with HashedFile(Path(job.temporary) / region.name) as file:
                file.write(memoryview(memory)[region.offset:region.offset + region.length])
                records[region.name] = file.close()
    except OSError as failure:
        error = f"{failure.filename or job.temporary}: {failure.strerror}"
    return records, error


def give_up(job: Job, error: str) -> None:
    """Tell rank 0 that this rank's files will not come. Raises OSError."""
    for region in job.files:  # room for the part, on a full disk
        (Path(job.temporary) / region.name).unlink(missing_ok=True)
    write_part(Path(job.temporary), rank=job.rank, save_id=job.save_id, files={}, error=error)


def _after(job: Job, verified: set[str]) -> None:
    """Mirror this rank's files; on rank 0 complete the mirror's copy, then prune."""
    final = Path(job.final)
    try:
        if not _wait_for(final, job):
            return
        if job.after.mirror is not None:
            start = time.perf_counter()
            upload(final, job.after.mirror, job.names)
            if job.rank == 0:
                finish_upload(final, job.after.mirror, timeout_s=job.timeout_s)
                _reply({"event": "mirror", "step": job.step, "path": job.after.mirror,
                        "seconds": round(time.perf_counter() - start, 3)})
        if job.rank == 0 and job.after.keep_checkpoints > 0:
            keep = {name: value for name, value in asdict(job.after).items() if name.startswith("keep_")}
            for removed in prune(final.parent, verified=verified, **keep):
                _reply({"event": "prune", "step": job.step, "path": str(removed)})
    except Exception as failure:  # of any storage's client: told, and the next checkpoint has its own chance
        _reply({"event": "after_save_failed", "step": job.step, "reason": f"{type(failure).__name__}: {failure}"})
    finally:
        _reply({"event": "after_save", "step": job.step})


def _wait_for(final: Path, job: Job) -> bool:
    """Until rank 0's writer has committed; False if it gave up."""
    deadline = time.monotonic() + job.timeout_s
    while not final.is_dir():
        given_up = not Path(job.temporary).is_dir() and not final.is_dir()
        if given_up or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Take a lock that ends with the process; True where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def wait_for_writers(checkpoints: Path, *, timeout_s: float) -> list[str]:
    """Let the writers of an earlier run, which may have been killed, end their work. Returns those that did not."""
    busy = {path.name: path for path in checkpoints.glob(_LOCK.format(0).replace("00000", "*"))}
    deadline = time.monotonic() + timeout_s
    while True:
        for name, path in list(busy.items()):
            with open(path, encoding="utf-8") as file:
                if _lock(file.fileno(), wait=False):
                    del busy[name]
        if not busy or time.monotonic() > deadline:
            return sorted(busy)
        time.sleep(0.1)


if __name__ == "__main__":
    if os.fork() == 0:  # no child of the training process: launchers end all of those, within seconds
        os.setsid()
        main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
