"""Commit a checkpoint atomically: every rank records the files that it wrote, then rank 0 renames the folder.

Ranks communicate only through files, so background processes can write while training continues or after it has ended.
If processes are killed at any point, earlier checkpoints are unchanged, and the new one is either complete or absent.
Imports no torch.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.checkpoint.format.hashed_files import FileRecord, write_atomically
from pretrain.checkpoint.format.manifest import MANIFEST, NOT_FINITE, Manifest
from pretrain.checkpoint.format.run_checkpoints import (
    LATEST_FILE,
    files_in,
    manifest_or_error,
    manifests_or_errors,
    parse_manifest,
)
from pretrain.errors import SaveError
from pretrain.paths import for_each_file, free_bytes, fsync
from pretrain.stored_json import build, read_json

if TYPE_CHECKING:
    from pretrain.config.plan import Plan

TEMPORARY = ".tmp-"  # prefix of the names of temporary folders and files
_PART = ".part-"  # prefix of the names of part files
_POLL_S = 0.05  # shortest time between two looks for part files
_POLL_FRACTION = 0.05  # fraction of the time since the first look that passes until the next one
_CHECK_S = 1.0  # shortest time between two checks whether writers have ended
_CHECKED = 64  # writers of one check: each has a lock file, which is opened


@dataclass(frozen=True)
class _Part:
    """Content of a part file: the files that a rank has written, or why it could not write them."""

    save_id: str
    rank: int
    files: dict[str, FileRecord]
    finite: bool | None  # whether their tensors have neither NaN nor infinity; None: not checked
    error: str | None


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of `step` is written before its commit."""
    return checkpoints / f"{TEMPORARY}global_step{step}"


def _part(temporary: Path, rank: int) -> Path:
    """Return the path of a rank's part file, which lists the files that the rank wrote."""
    return temporary / f"{_PART}{rank:05d}.json"


def check_space(checkpoints: Path, *, needed_bytes: int) -> None:
    """Raise SaveError if the file system has less free space than `needed_bytes`."""
    free = free_bytes(checkpoints)
    if free < needed_bytes:
        raise SaveError(f"{checkpoints}: {needed_bytes:,} bytes needed, {free:,} bytes free")


def remove_leftovers(checkpoints: Path) -> list[Path]:
    """Remove and return the temporary folders and files of a killed run. Call it on rank 0, before the first save."""
    leftovers = sorted(checkpoints.glob(f"{TEMPORARY}*"))
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return leftovers


def write_part(temporary: Path, *, rank: int, save_id: str, files: dict[str, FileRecord], finite: bool | None = None,
               error: str | None = None) -> None:
    """Record the files that this rank has written and synced, or the `error` that prevented this. Raises OSError."""
    write_atomically(_part(temporary, rank), json.dumps(asdict(_Part(save_id, rank, files, finite, error))))


def finish_part(temporary: Path, *, rank: int, save_id: str, finish: Callable[[], dict[str, FileRecord]],
                finite: bool) -> str | None:
    """Let `finish` write and sync this rank's files, and record them. Return why that failed; None: it did not."""
    try:
        write_part(temporary, rank=rank, save_id=save_id, files=finish(), finite=finite)
    except OSError as error:
        return f"{error.filename or temporary}: {error.strerror or error}"
    return None


def has_part(temporary: Path, *, rank: int, save_id: str) -> bool:
    """Return whether the rank has recorded that it wrote all its files."""
    with contextlib.suppress(OSError, ValueError, SaveError):
        return _read_part(temporary, rank, save_id) is not None
    return False


def commit(temporary: Path, manifest: Manifest, *, timeout_s: float,
           has_ended: Callable[[int], bool] = lambda rank: False) -> Manifest:
    """Wait until every rank has recorded its files, then make the temporary folder a checkpoint. Rank 0 only.

    Args:
        manifest: the manifest, without `files` and `finite`.
        has_ended: returns whether the writer of a rank has ended.

    Returns:
        The manifest with all files. The file `latest` names only checkpoints that are good.

    Raises SaveError, and removes the temporary folder, if a rank records an error, if a rank records nothing within
    `timeout_s`, if the disk fails, or if NaN or infinity would replace a good checkpoint of the same step.
    """
    final = temporary.with_name(temporary.name.removeprefix(TEMPORARY))
    try:
        with save_errors(final):
            manifest = _complete(temporary, final, manifest, timeout_s, has_ended)
    except SaveError:
        discard(temporary)
        raise
    if manifest.is_good:
        with contextlib.suppress(OSError):  # the checkpoint is complete even if a full disk keeps `latest` outdated
            write_latest(final)
    return manifest


@contextlib.contextmanager
def save_errors(what: object) -> Iterator[None]:
    """Raise SaveError for an error of the file system in the block."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{what}: {error}") from error


def _complete(temporary: Path, final: Path, manifest: Manifest, timeout_s: float,
              has_ended: Callable[[int], bool]) -> Manifest:
    """Collect the parts of all ranks, write the manifest, and rename the folder. Raises SaveError and OSError."""
    files, finite = wait_for_parts(temporary, manifest.save_id, manifest.world_size, timeout_s, has_ended)
    check_files(temporary, files, world_size=manifest.world_size)
    manifest = replace(manifest, files=files, finite=finite)
    if not manifest.is_good and _is_good(final):
        raise SaveError(f"{final}: {NOT_FINITE}, and a good checkpoint of this step exists already")
    write_manifest(temporary, manifest)
    remove_parts(temporary, world_size=manifest.world_size)
    publish(temporary, final)
    return manifest


def _is_good(folder: Path) -> bool:
    found = manifest_or_error(folder)
    return isinstance(found, Manifest) and found.is_good


def discard(temporary: Path) -> None:
    """Remove the folder. Rename it first, so that other ranks cannot create files in it during the deletion."""
    renamed = temporary.with_name(f"{TEMPORARY}discarded-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        temporary.rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def wait_for_parts(temporary: Path, save_id: str, world_size: int, timeout_s: float,
                   has_ended: Callable[[int], bool]) -> tuple[dict[str, FileRecord], bool | None]:
    """Wait until each rank has recorded its files. Return the files of all ranks, and whether all are finite.

    A look lists the folder, and opens the new part files. The looks become rarer, so that their number is small.

    Raises SaveError.
    """
    files: dict[str, FileRecord] = {}
    finite: list[bool | None] = []
    missing, ended = list(range(world_size)), set[int]()
    read: set[tuple[int, int]] = set()  # rank and inode: of another save, a part is read once, and then replaced
    start = checked = time.monotonic()
    while True:
        found = _parts_in(temporary)
        new = [rank for rank in missing if rank in found and (rank, found[rank]) not in read]
        read |= {(rank, found[rank]) for rank in new}
        done = set[int]()
        for rank, part in zip(new, for_each_file(partial(_read_part, temporary, save_id=save_id), new), strict=True):
            if part is not None:
                if duplicates := files.keys() & part.files.keys():
                    raise SaveError(f"{temporary}: both rank {rank} and another rank wrote {min(duplicates)}")
                files.update(part.files)
                finite.append(part.finite)
                done.add(rank)
        missing = [rank for rank in missing if rank not in done]
        if not missing:
            return dict(sorted(files.items())), False if False in finite else None if None in finite else True
        now = time.monotonic()
        if lost := [rank for rank in missing if rank in ended]:
            raise SaveError(f"{temporary}: {_rank_list(lost)} ended before writing all files")
        if now > start + timeout_s:
            raise SaveError(f"{temporary}: {_rank_list(missing)} did not write all files within {timeout_s:g} s")
        if now > checked + _CHECK_S:  # read the parts once more before failing: a writer may write its part and end
            checked, ended = now, {rank for rank in missing[:_CHECKED] if has_ended(rank)}
            missing = missing[_CHECKED:] + missing[:_CHECKED]  # the next check is of others
        time.sleep(min(max(_POLL_S, _POLL_FRACTION * (now - start)), start + timeout_s - now + _POLL_S))


def _parts_in(temporary: Path) -> dict[int, int]:
    """Return rank and inode of each part file: a listing, which needs no answer for each file."""
    with os.scandir(temporary) as entries:
        names = {entry.name.removeprefix(_PART).removesuffix(".json"): entry.inode() for entry in entries
                 if entry.name.startswith(_PART)}
    return {int(name): inode for name, inode in names.items() if name.isdecimal()}


def _rank_list(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 3, 4, ..."; at most eight ranks are named."""
    names = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{', ...' if len(ranks) > 8 else ''}"


def _read_part(temporary: Path, rank: int, save_id: str) -> _Part | None:
    """Return what a rank recorded; None if there is no part file of this save.

    Raises SaveError if the rank recorded an error, or if the part file is damaged.
    """
    try:
        part = build(_Part, read_json(_part(temporary, rank)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SaveError(f"{_part(temporary, rank)}: the file is damaged: {error}") from error
    if part.save_id != save_id:
        return None
    if part.error is not None:
        raise SaveError(f"{temporary}: rank {rank}: {part.error}")
    return part


def check_files(temporary: Path, files: dict[str, FileRecord], *, world_size: int) -> None:
    """Raise SaveError unless the folder holds exactly the recorded files, with the recorded sizes."""
    parts = {_part(temporary, rank).name for rank in range(world_size)}
    present = set(files_in(temporary)) - parts
    if unknown := sorted(present - files.keys()):
        raise SaveError(f"{temporary}: no rank has recorded {unknown[0]}")
    if missing := sorted(files.keys() - present):
        raise SaveError(f"{temporary}: {missing[0]} is missing; do all hosts share this folder?")
    sizes = for_each_file(lambda name: (temporary / name).stat().st_size, list(files))
    for (name, record), size in zip(files.items(), sizes, strict=True):
        if size != record.bytes:
            raise SaveError(f"{temporary}: {name} has {size} bytes; {record.bytes} were written")


def write_manifest(temporary: Path, manifest: Manifest) -> None:
    """Write and sync manifest.json. After this the folder is a complete checkpoint under a temporary name."""
    write_atomically(temporary / MANIFEST, manifest.to_json())
    for folder, _, _ in os.walk(temporary):
        fsync(Path(folder))


def remove_parts(temporary: Path, *, world_size: int) -> None:
    """Delete the per-rank part files."""
    for_each_file(lambda rank: _part(temporary, rank).unlink(), range(world_size))
    fsync(temporary)


def publish(temporary: Path, final: Path) -> None:
    """Rename the temporary folder to its final name.

    If a folder already has this name, it is damaged or not finite, because a run resumes from its newest good one.
    This folder is removed.
    """
    damaged = final.with_name(f"{TEMPORARY}damaged-{final.name}")
    if final.exists():
        shutil.rmtree(damaged, ignore_errors=True)
        final.rename(damaged)
    temporary.rename(final)
    fsync(final.parent)
    shutil.rmtree(damaged, ignore_errors=True)


def write_latest(final: Path) -> None:
    """Write `latest`, which plain DeepSpeed reads. This program uses the folders' names instead."""
    write_atomically(final.parent / LATEST_FILE, final.name)


def next_checkpoint_bytes(plan: "Plan", checkpoints: Path) -> int:
    """Return the size in bytes of the next checkpoint.

    This is the size of the newest complete checkpoint if it has the plan's ZeRO stage and precision, else an estimate.
    """
    newest = next((found for _, found in manifests_or_errors(checkpoints, parse_manifest)
                   if isinstance(found, Manifest)), None)
    if newest is not None and not newest.weights_only and \
            (newest.zero_stage, newest.precision) == (plan.layout.zero_stage, plan.layout.precision):
        return newest.num_bytes
    return plan.layout.checkpoint_bytes(plan.model.num_parameters())
