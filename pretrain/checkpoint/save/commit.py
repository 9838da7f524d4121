"""How a folder of files becomes a checkpoint, at once: every rank says what it wrote, then rank 0 renames the folder.

Ranks speak through files alone, so that processes of their own can write while training goes on, or has ended.
A kill at any point leaves the checkpoints before as they were, and the new one whole or absent.
"""

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from pretrain.checkpoint.format.files import FileRecord, free_bytes, fsync, write_atomically
from pretrain.checkpoint.format.manifest import LATEST, MANIFEST, Manifest, files_in
from pretrain.errors import SaveError

TEMPORARY = ".tmp-"
_POLL_S = 0.05
_ASK_S = 1.0


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is one."""
    return checkpoints / f"{TEMPORARY}global_step{step}"


def _part(temporary: Path, rank: int) -> Path:
    return temporary / f".part-{rank:05d}.json"


def check_space(checkpoints: Path, *, needed_bytes: int) -> None:
    """Raises SaveError where the file system has less room than that."""
    free = free_bytes(checkpoints)
    if free < needed_bytes:
        raise SaveError(f"{checkpoints}: {needed_bytes:,} bytes needed, {free:,} bytes free")


def remove_leftovers(checkpoints: Path) -> list[Path]:
    """Remove what a killed run left unfinished; what that was. Rank 0, before anything is written."""
    leftovers = sorted(checkpoints.glob(f"{TEMPORARY}*"))
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return leftovers


def write_part(temporary: Path, *, rank: int, save_id: str, files: dict[str, FileRecord],
               error: str | None = None) -> None:
    """Say what this rank wrote, all of it on the disk already, or (`error`) why it could not. Raises OSError."""
    part = {"save_id": save_id, "rank": rank, "files": {name: asdict(record) for name, record in files.items()},
            "error": error}
    write_atomically(_part(temporary, rank), json.dumps(part))


def has_part(temporary: Path, *, rank: int, save_id: str) -> bool:
    """Whether the rank has said that it wrote everything."""
    try:
        return _read_part(temporary, rank, save_id) is not None
    except (OSError, ValueError, SaveError):
        return False


def commit(temporary: Path, manifest: Manifest, *, timeout_s: float,
           has_ended: Callable[[int], bool] = lambda rank: False) -> Manifest:
    """Make a checkpoint of the folder once every rank has written its part. Rank 0 only.

    Args:
        manifest: without files.
        has_ended: whether a rank will write no more.

    Returns:
        The manifest, with all files.

    Raises SaveError where a rank reports an error, or none within `timeout_s`, or the disk refuses: the temporary
    folder is removed then.
    """
    final = temporary.with_name(temporary.name.removeprefix(TEMPORARY))
    try:
        files = wait_for_parts(temporary, manifest.save_id, manifest.world_size, timeout_s, has_ended)
        check_files(temporary, files, world_size=manifest.world_size)
        manifest = replace(manifest, files=files)
        write_manifest(temporary, manifest)
        remove_parts(temporary, world_size=manifest.world_size)
        publish(temporary, final)
    except (OSError, SaveError) as error:
        discard(temporary)
        raise error if isinstance(error, SaveError) else SaveError(f"{final}: {error}") from error
    with contextlib.suppress(OSError):  # no room for it: the checkpoint is there, and the next save tries again
        write_latest(final)
    return manifest


def discard(temporary: Path) -> None:
    """Remove it. Renamed first: other ranks may still write, and are not to make files in it while it is emptied."""
    renamed = temporary.with_name(f"{TEMPORARY}discarded-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        temporary.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def wait_for_parts(temporary: Path, save_id: str, world_size: int, timeout_s: float,
                   has_ended: Callable[[int], bool]) -> dict[str, FileRecord]:
    """The files of all ranks, as soon as each has said what it wrote. Raises SaveError."""
    files: dict[str, FileRecord] = {}
    missing, ended = set(range(world_size)), set[int]()
    start = asked = time.monotonic()
    while True:
        for rank in sorted(missing):
            part = _read_part(temporary, rank, save_id)
            if part is not None:
                twice = files.keys() & part.keys()
                if twice:
                    raise SaveError(f"{temporary}: {min(twice)} was written by rank {rank} and by another one")
                files.update(part)
                missing.discard(rank)
        if not missing:
            return dict(sorted(files.items()))
        now = time.monotonic()
        if missing & ended or now > start + timeout_s:
            why = "which ended" if missing & ended else f"within {timeout_s:g} s"
            names = sorted(missing & ended or missing)
            raise SaveError(f"{temporary}: nothing from rank{'s' * (len(names) > 1)} "
                            f"{', '.join(map(str, names[:8]))}{' ...' * (len(names) > 8)}, {why}")
        if now > asked + _ASK_S:  # and then look for its part once more: it may be the last thing that it wrote
            asked, ended = now, {rank for rank in missing if has_ended(rank)}
        time.sleep(_POLL_S)


def _read_part(temporary: Path, rank: int, save_id: str) -> dict[str, FileRecord] | None:
    """What a rank wrote; None: it is still writing, or this is the part of an attempt that was killed."""
    try:
        part = json.loads(_part(temporary, rank).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if part["save_id"] != save_id:
        return None
    if part["error"] is not None:
        raise SaveError(f"{temporary}: rank {rank}: {part['error']}")
    return {name: FileRecord(**record) for name, record in part["files"].items()}


def check_files(temporary: Path, files: dict[str, FileRecord], *, world_size: int) -> None:
    """Raises SaveError unless the folder holds just the files of the parts, with their sizes."""
    parts = {_part(temporary, rank).name for rank in range(world_size)}
    there = set(files_in(temporary)) - parts
    for name in sorted(there ^ files.keys()):
        raise SaveError(f"{temporary}: {name} " + ("was hashed by no rank" if name in there else
                                                   "is not there: do all hosts share this folder?"))
    for name, record in files.items():
        size = (temporary / name).stat().st_size
        if size != record.bytes:
            raise SaveError(f"{temporary}: {name} has {size} bytes; {record.bytes} were written")


def write_manifest(temporary: Path, manifest: Manifest) -> None:
    """From here on the folder is a checkpoint, but for its name."""
    write_atomically(temporary / MANIFEST, manifest.to_json())
    for folder in (path for path in temporary.rglob("*") if path.is_dir()):
        fsync(folder)
    fsync(temporary)


def remove_parts(temporary: Path, *, world_size: int) -> None:
    """They have served."""
    for rank in range(world_size):
        _part(temporary, rank).unlink()
    fsync(temporary)


def publish(temporary: Path, final: Path) -> None:
    """Give the folder its name. What has that name already is a damaged checkpoint: a whole one was resumed from."""
    damaged = final.with_name(f"{TEMPORARY}damaged-{final.name}")
    if final.exists():
        shutil.rmtree(damaged, ignore_errors=True)
        final.rename(damaged)
    temporary.rename(final)
    fsync(final.parent)
    shutil.rmtree(damaged, ignore_errors=True)


def write_latest(final: Path) -> None:
    """For plain DeepSpeed, which reads it; this program looks at the folders."""
    write_atomically(final.parent / LATEST, final.name)
