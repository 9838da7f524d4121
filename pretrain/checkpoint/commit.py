"""How a folder of files becomes a checkpoint, at once: every rank says what it wrote, then rank 0 renames the folder.

Ranks speak through files alone, so that processes of their own can write while training goes on, or has ended.
A kill at any point leaves the checkpoints before as they were, and the new one whole or absent.
"""

import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

from pretrain.checkpoint.files import FileRecord, free_bytes, fsync, write_atomically
from pretrain.checkpoint.manifest import LATEST, MANIFEST, Manifest, files_in

TEMPORARY = ".tmp-"


class SaveError(Exception):
    """A checkpoint could not be written. The earlier ones are as they were."""


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


def commit(temporary: Path, *, save_id: str, world_size: int, manifest: Manifest, timeout_s: float,
           poll_s: float = 0.05) -> Path:
    """Make a checkpoint of the folder once every rank has written its part; its final name. Rank 0 only.

    Raises SaveError where a rank reports an error, or none within `timeout_s`, or the disk refuses: the temporary
    folder is removed then.
    """
    final = temporary.with_name(temporary.name.removeprefix(TEMPORARY))
    try:
        files = wait_for_parts(temporary, save_id=save_id, world_size=world_size, timeout_s=timeout_s, poll_s=poll_s)
        check_files(temporary, files, world_size=world_size)
        write_sealed_manifest(temporary, replace(manifest, files=files))
        remove_parts(temporary, world_size=world_size)
        publish(temporary, final)
        point_latest(final)
    except (OSError, SaveError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise error if isinstance(error, SaveError) else SaveError(f"{final}: {error}") from error
    return final


def wait_for_parts(temporary: Path, *, save_id: str, world_size: int, timeout_s: float,
                   poll_s: float) -> dict[str, FileRecord]:
    """The files of all ranks, as soon as each has said what it wrote. Raises SaveError."""
    files: dict[str, FileRecord] = {}
    missing, deadline = set(range(world_size)), time.monotonic() + timeout_s
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
        if time.monotonic() > deadline:
            raise SaveError(f"{temporary}: nothing from rank{'s' * (len(missing) > 1)} "
                            f"{', '.join(map(str, sorted(missing)[:8]))} within {timeout_s:g} s")
        time.sleep(poll_s)


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


def write_sealed_manifest(temporary: Path, manifest: Manifest) -> None:
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


def point_latest(final: Path) -> None:
    """For plain DeepSpeed, which reads it; this program looks at the folders."""
    write_atomically(final.parent / LATEST, final.name)
