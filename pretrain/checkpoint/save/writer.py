"""The background process of one rank: it writes snapshots, commits, prunes and mirrors while training continues.

It imports neither torch nor DeepSpeed. It talks to its training process in lines of JSON (a `SaveJob` in, replies out)
and to the writers of other ranks through files alone. When the training process dies, even by SIGKILL, it finishes the
jobs that it has received and exits, so a checkpoint whose snapshots were all taken is not lost.
"""

import contextlib
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.files import FileRecord, HashedFile
from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.save.commit import commit, discard, has_part, write_part
from pretrain.checkpoint.save.mirror import finish_upload, upload
from pretrain.checkpoint.save.retention import prune
from pretrain.checkpoint.save.snapshot import Region
from pretrain.checkpoint.save.writer_locks import has_ended, hold_lock
from pretrain.errors import ConfigError, SaveError

_REPLY_LOCK = threading.Lock()  # the main thread and the thread that runs `_after_save` both reply
_CHECK_S = 1.0  # between checks whether rank 0's writer has ended


@dataclass(frozen=True)
class AfterSave:
    """What to do after a checkpoint is committed: which older ones to keep, and the URL to mirror it to."""

    keep_checkpoints: int = 0
    keep_every: int = 0
    keep_best: int = 0
    mirror: str | None = None


@dataclass(frozen=True)
class SnapshotFiles:
    """Files that the writer has to write. Paths are absolute."""

    temporary: str  # folder in which the files are written
    files: list[Region]  # their locations in the snapshot
    error: str | None  # why the training process could not take the snapshot
    manifest: str | None  # JSON without files; None on ranks other than 0


@dataclass(frozen=True)
class SaveJob:
    """One checkpoint, as one rank's training process describes it to its writer."""

    step: int
    final: str  # folder of the checkpoint after the commit
    rank: int
    save_id: str
    timeout_s: float  # for the other ranks' writers to write or copy their files
    locks_are_shared: bool  # whether every host sees the locks of `writer_locks`
    names: list[str]  # files that this rank copies to the mirror
    after: AfterSave
    snapshot: SnapshotFiles | None = None  # None: the checkpoint is already committed


def main(descriptor: int, checkpoints: Path, rank: int) -> None:
    """Execute jobs until the training process closes this process's standard input."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # these signals are meant for the training process
        signal.signal(number, signal.SIG_IGN)
    verified: set[str] = set()
    # mirroring has its own thread, so it does not delay the next save; the lock is released before that thread is
    # joined, so it does not delay the next start of the run either
    with ThreadPoolExecutor(1) as after_save, hold_lock(checkpoints, rank):
        _reply({"event": "ready"})
        for line in sys.stdin:
            job = _read_job(line)
            if job.snapshot is not None:
                reply = _save(job, job.snapshot, descriptor)
                _reply(reply)
                if reply["event"] == "save_failed":
                    continue
            after_save.submit(_after_save, job, verified)


def _read_job(line: str) -> SaveJob:
    values = json.loads(line)
    snapshot = values.pop("snapshot")
    if snapshot is not None:
        snapshot = SnapshotFiles(**{**snapshot, "files": [Region(*file) for file in snapshot["files"]]})
    return SaveJob(**{**values, "after": AfterSave(**values["after"]), "snapshot": snapshot})


def _reply(reply: dict[str, Any]) -> None:
    """Send a line of JSON to the training process."""
    with _REPLY_LOCK, contextlib.suppress(OSError):  # the training process may have ended
        os.write(1, json.dumps(reply).encode() + b"\n")


def _save(job: SaveJob, snapshot: SnapshotFiles, descriptor: int) -> dict[str, Any]:
    """Write this rank's files and, on rank 0, commit when all ranks have written theirs. Return the reply."""
    start = time.perf_counter()
    temporary = Path(snapshot.temporary)
    error = snapshot.error
    committed: Manifest | None = None
    try:
        if error is None:
            write_part(temporary, rank=job.rank, save_id=job.save_id, files=_write_files(snapshot, descriptor))
    except OSError as failure:
        error = f"{failure.filename or temporary}: {failure.strerror}"
    if error is not None:
        report_failure(job, error)
    elif snapshot.manifest is not None:
        try:
            committed = commit(temporary, Manifest.from_json(snapshot.manifest), timeout_s=job.timeout_s,
                               has_ended=partial(_has_ended, job))
        except SaveError as failure:
            error = str(failure)
    if error is not None:
        return {"event": "save_failed", "step": job.step, "reason": error}
    num_bytes = sum(record.bytes for record in committed.files.values()) if committed else None  # only rank 0 knows it
    return {"event": "save", "step": job.step, "path": job.final, "bytes": num_bytes,
            "seconds": round(time.perf_counter() - start, 3)}


def _write_files(snapshot: SnapshotFiles, descriptor: int) -> dict[str, FileRecord]:
    """Write the snapshot's files and return their sizes and hashes. Raises OSError."""
    records: dict[str, FileRecord] = {}
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    for region in snapshot.files:
        with HashedFile(Path(snapshot.temporary) / region.name) as file:
            file.write(memoryview(memory)[region.offset:region.offset + region.length])
            records[region.name] = file.close()
    return records


def report_failure(job: SaveJob, error: str) -> None:
    """Report to rank 0's writer that this rank's files will not be written; on rank 0, abandon the save."""
    if job.snapshot is None:
        return
    temporary = Path(job.snapshot.temporary)
    if job.rank == 0:
        discard(temporary)
        return
    if has_part(temporary, rank=job.rank, save_id=job.save_id):  # the files were written before the writer died
        return
    with contextlib.suppress(OSError):  # without a part file, rank 0's writer waits until its time-out
        for region in job.snapshot.files:  # frees space for the part file on a full disk
            (temporary / region.name).unlink(missing_ok=True)
        write_part(temporary, rank=job.rank, save_id=job.save_id, files={}, error=error)


def _after_save(job: SaveJob, verified: set[str]) -> None:
    """Mirror this rank's files; on rank 0 complete the mirror's copy, then prune."""
    final = Path(job.final)
    try:
        if job.snapshot is not None and not _becomes_committed(job):
            return  # rank 0's writer has replied with the reason
        if job.after.mirror is not None:
            _reply_on_error(job, partial(_mirror, job, final, job.after.mirror))
        if job.rank == 0 and job.after.keep_checkpoints > 0:  # even if mirroring failed: otherwise the disk fills up
            _reply_on_error(job, partial(_prune, job, final.parent, verified))
    finally:
        _reply({"event": "after_save", "step": job.step})


def _reply_on_error(job: SaveJob, action: Callable[[], None]) -> None:
    """Run `action`, and send a reply if it fails."""
    try:
        action()
    except Exception as failure:  # each storage client has its own exceptions; the next checkpoint is tried again
        has_message = isinstance(failure, (ConfigError, SaveError))
        _reply({"event": "after_save_failed", "step": job.step,
                "reason": str(failure) if has_message else f"{type(failure).__name__}: {failure}"})


def _mirror(job: SaveJob, final: Path, url: str) -> None:
    start = time.perf_counter()
    upload(final, url, job.names, rank=job.rank, save_id=job.save_id)
    if job.rank == 0:
        finish_upload(final, url, timeout_s=job.timeout_s)
        _reply({"event": "mirror", "step": job.step, "path": url, "seconds": round(time.perf_counter() - start, 3)})


def _prune(job: SaveJob, checkpoints: Path, verified: set[str]) -> None:
    keep = {name: value for name, value in asdict(job.after).items() if name.startswith("keep_")}
    for removed in prune(checkpoints, verified=verified, **keep):
        _reply({"event": "prune", "step": job.step, "path": str(removed)})


def is_committed(job: SaveJob) -> bool:
    """Return whether this save, and not another save of the same step, has been committed."""
    try:
        return Manifest.from_json((Path(job.final) / MANIFEST).read_text(encoding="utf-8")).save_id == job.save_id
    except (OSError, ValueError):
        return False


def _becomes_committed(job: SaveJob) -> bool:
    """Wait for rank 0's writer. Return whether it has committed this save."""
    assert job.snapshot is not None
    start = checked = time.monotonic()
    ended = False
    while not is_committed(job):
        now = time.monotonic()
        if ended or now > start + job.timeout_s or not Path(job.snapshot.temporary).is_dir():
            return is_committed(job)  # rank 0 may have renamed the folder between the two checks
        if now > checked + _CHECK_S:
            checked, ended = now, _has_ended(job, 0)
        time.sleep(min(1.0, 0.05 + (now - start) / 10))
    return True


def _has_ended(job: SaveJob, rank: int) -> bool:
    return job.locks_are_shared and has_ended(Path(job.final).parent, rank)


if __name__ == "__main__":
    if os.fork() == 0:  # launchers kill all children of the training process when it ends; a forked orphan survives
        os.setsid()
        main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
