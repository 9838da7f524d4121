"""The background process of one rank: it writes snapshots, commits, mirrors and prunes while training continues.

It imports neither torch nor DeepSpeed. It reads each `SaveJob` as a line of JSON on its standard input, and writes its
replies to its standard output. Writers of different ranks communicate only through files. If the training process ends,
even by SIGKILL, the writer finishes all jobs that it has received. So a checkpoint is not lost once every rank has sent
its job.

A lock file shows that the writer is running: the writer locks a file in the checkpoints folder until its last save is
committed or its process ends for any reason. A file server releases the locks of a host that stops responding. Some
file systems have no locks. On others (BeeGFS and Lustre with common mount options) only processes of the same host see
a lock. In both cases time-outs replace the locks.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.hashed_files import FileGroup, FileRecord
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import has_ended, hold_lock, parse_head
from pretrain.checkpoint.save.commit import commit, discard, finish_part, has_part, write_part
from pretrain.checkpoint.save.mirror import finish_upload, upload
from pretrain.checkpoint.save.retention import prune
from pretrain.errors import ConfigError, SaveError
from pretrain.stored_json import build

_REPLY_LOCK = threading.Lock()  # the main thread and the thread that runs `_after_save` both reply
_CHECK_S = 1.0  # interval of the checks whether rank 0's writer has ended
_POLL_S = 0.1
_MOST_POLLS_PER_S = 500  # polls of all ranks together


@dataclass(frozen=True)
class Region:
    """Name and location of a file in the snapshot. Offset and length are in bytes."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class SnapshotFiles:
    """Files in a snapshot that the writer must write. Paths are absolute."""

    temporary: str  # folder in which the files are written
    files: list[Region]  # their locations in the snapshot
    error: str | None  # why the training process could not take the snapshot
    finite: bool  # whether their tensors have neither NaN nor infinity
    manifest: str | None  # text of manifest.json with empty `files`; None on ranks other than 0


@dataclass(frozen=True)
class SaveJob:
    """One checkpoint, as one rank's training process describes it to its writer."""

    step: int
    final: str  # folder of the checkpoint after the commit
    rank: int
    world_size: int
    save_id: str
    timeout_s: float  # limit for the other ranks' writers to write or mirror their files
    locks_are_shared: bool  # whether every host sees the locks of `hold_lock`
    names: list[str]  # files that this rank copies to the mirror
    mirror: str | None  # its URL
    keep: dict[str, int]  # rules of `prune` for older checkpoints
    snapshot: SnapshotFiles | None = None  # None: the checkpoint is already committed


def main(descriptor: int, checkpoints: Path, rank: int) -> None:
    """Execute jobs until the training process closes this process's standard input."""
    # these signals are meant for the training process
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    verified: set[str] = set()
    # mirroring has its own thread, so that it does not delay the next save; `with` releases the lock before it joins
    # this thread, so that mirroring does not delay the next start of the run either
    with ThreadPoolExecutor(1) as after_save, hold_lock(checkpoints, rank):
        _reply({"event": "ready"})
        for line in sys.stdin:
            job = build(SaveJob, json.loads(line))
            if job.snapshot is not None:
                reply = _save(job, job.snapshot, descriptor)
                _reply(reply)
                if reply["event"] == "save_failed":
                    continue
            after_save.submit(_after_save, job, verified)


def _reply(reply: dict[str, Any]) -> None:
    """Send a line of JSON to the training process."""
    with _REPLY_LOCK, contextlib.suppress(OSError):  # the training process may have ended
        os.write(1, json.dumps(reply).encode() + b"\n")


def _save(job: SaveJob, snapshot: SnapshotFiles, descriptor: int) -> dict[str, Any]:
    """Write this rank's files. On rank 0, commit as soon as all ranks have written. Return the reply."""
    start = time.perf_counter()
    temporary = Path(snapshot.temporary)
    committed: Manifest | None = None
    error = snapshot.error or finish_part(temporary, rank=job.rank, save_id=job.save_id, finite=snapshot.finite,
                                          finish=partial(_write_files, snapshot, descriptor))
    if error is not None:
        # on a full disk there may be no space for the part file; without it rank 0's writer waits for its time-out
        while not report_failure(job, error) and time.perf_counter() < start + job.timeout_s and temporary.is_dir():
            time.sleep(_CHECK_S)
    elif snapshot.manifest is not None:
        try:
            committed = commit(temporary, Manifest.from_json(snapshot.manifest), timeout_s=job.timeout_s,
                               has_ended=partial(_has_ended, job))
        except SaveError as failure:
            error = str(failure)
    if error is not None:
        return {"event": "save_failed", "step": job.step, "reason": error}
    # only rank 0 knows the files of all ranks
    num_bytes = committed.num_bytes if committed else None
    return {"event": "save", "step": job.step, "path": job.final, "bytes": num_bytes,
            "finite": committed.is_good if committed else None,
            "seconds": round(time.perf_counter() - start, 3)}


def _write_files(snapshot: SnapshotFiles, descriptor: int) -> dict[str, FileRecord]:
    """Write the snapshot's files and return their sizes and hashes. Raises OSError."""
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    with FileGroup() as group:
        for region in snapshot.files:
            with group.open_file(Path(snapshot.temporary) / region.name) as file:
                file.write(memoryview(memory)[region.offset:region.offset + region.length])
        return group.finish()


def report_failure(job: SaveJob, error: str) -> bool:
    """Report to rank 0's writer that this rank's files will not be written; on rank 0, remove the temporary folder.

    Returns False if the report could not be written.
    """
    if job.snapshot is None:
        return True
    temporary = Path(job.snapshot.temporary)
    if job.rank == 0:
        discard(temporary)
        return True
    if has_part(temporary, rank=job.rank, save_id=job.save_id):  # the writer wrote all files before it ended
        return True
    with contextlib.suppress(OSError):
        for region in job.snapshot.files:  # on a full disk, make space for the part file
            (temporary / region.name).unlink(missing_ok=True)
        write_part(temporary, rank=job.rank, save_id=job.save_id, files={}, error=error)
        return True
    return False


def _after_save(job: SaveJob, verified: set[str]) -> None:
    """Mirror this rank's files, unless they hold NaN. On rank 0, also write the mirror's manifest and prune."""
    final = Path(job.final)
    verified.discard(final.name)  # after a rollback the run saves this step again
    try:
        if job.rank != 0 and job.mirror is None:
            return  # nothing to do after the commit
        committed = _wait_for_commit(job)
        if committed is None:
            return  # rank 0's writer reports the reason
        if job.mirror is not None and committed.is_good:
            _reply_on_error(job, partial(_mirror, job, final, job.mirror))
        if job.rank == 0:  # even if mirroring failed, so that the disk does not fill up
            _reply_on_error(job, partial(_prune, job, final.parent, verified))
    finally:
        _reply({"event": "after_save", "step": job.step})


def _reply_on_error(job: SaveJob, action: Callable[[], None]) -> None:
    """Call `action`, and send a reply if it raises an exception."""
    try:
        action()
    except Exception as failure:  # each storage client has its own exception classes
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
    for removed in prune(checkpoints, verified=verified, **job.keep):
        _reply({"event": "prune", "step": job.step, "path": str(removed)})


def committed_manifest(job: SaveJob) -> Manifest | None:
    """Return the manifest of this save, without its files; None if it is not committed.

    Another save of the same step does not count.
    """
    with contextlib.suppress(ConfigError):
        manifest = parse_head(Path(job.final))
        return manifest if manifest.save_id == job.save_id else None
    return None


def _wait_for_commit(job: SaveJob) -> Manifest | None:
    """Wait until rank 0's writer has committed this save or given up. Return the manifest if it is committed."""
    start = checked = time.monotonic()
    ended = False
    longest_s = max(_CHECK_S, job.world_size / _MOST_POLLS_PER_S)  # the writers of all ranks wait
    while (committed := committed_manifest(job)) is None and job.snapshot is not None:
        now = time.monotonic()
        if ended or now > start + job.timeout_s or not Path(job.snapshot.temporary).is_dir():
            return committed_manifest(job)  # rank 0's writer may have renamed the folder since the last check
        if now > checked + longest_s:
            checked, ended = now, _has_ended(job, 0)
        time.sleep(min(longest_s, longest_s / 20 + (now - start) / 10))
    return committed


def _has_ended(job: SaveJob, rank: int) -> bool:
    return job.locks_are_shared and has_ended(Path(job.final).parent, rank)


if __name__ == "__main__":
    if os.fork() == 0:  # launchers kill all children of a training process that ends, but not a forked orphan
        os.setsid()
        main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
