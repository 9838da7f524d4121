"""All ranks choose the checkpoint to go on from together: rank 0 proposes, each verifies a share of its files."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname

import torch.distributed as dist

from pretrain.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_folders,
    manifest_or_error,
    read_manifest,
    step_of,
)
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.checkpoint.format.verify import files_of_rank, find_damage, unexpected_files
from pretrain.checkpoint.load.resume import Resume, checkpoints_folder, make_resume, reject_overwrite
from pretrain.checkpoint.save.commit import remove_leftovers
from pretrain.checkpoint.save.mirror import check_mirror, fetch, finished_in_mirror
from pretrain.checkpoint.save.writer_locks import wait_for_writers
from pretrain.config.validate import Plan
from pretrain.console.progress import Progress
from pretrain.distributed.collectives import from_rank_0, gather, wait_until_all
from pretrain.errors import ConfigError, SaveError

Say = Callable[[str], None]
Offer = tuple[Path, str] | str  # a folder and its manifest.json; or why there is none


def agree_on_checkpoint(plan: Plan, say: Say) -> Resume | None:
    """The newest checkpoint whose files have the hashes of its manifest; None: begin at step 0. Collective.

    Raises ConfigError, on every rank, where there are checkpoints and none is whole, or where this run cannot go on
    from the newest whole one.
    """
    offers = _offers(plan, say)  # only rank 0's is asked
    complaints: list[str] = []
    while (offer := from_rank_0(lambda: _next(offers))) is not None:
        if isinstance(offer, str):
            complaints.append(offer)
            continue
        folder, manifest = offer[0], Manifest.from_json(offer[1])
        found = _find_damage_together(folder, manifest)
        if not found:
            _reject_foreign_pickles(folder, manifest)
            return make_resume(folder, manifest, complaints, plan)
        complaints += found
    if complaints:
        raise ConfigError(str(checkpoints_folder(plan)), found=f"no whole checkpoint ({complaints[0]})",
                          expected="at least one whole checkpoint", remedy="restore one, or choose another --save")
    if plan.args.resume == "required":
        raise ConfigError("--resume required", found="no checkpoint", expected="at least one",
                          remedy="--resume auto begins at step 0")
    return None


def _next(offers: Iterator[Offer]) -> Offer | None:
    try:
        return next(offers, None)
    except OSError as error:  # of the run folder's file system
        raise SaveError(str(error)) from error


def _offers(plan: Plan, say: Say) -> Iterator[Offer]:
    """What there is to go on from, by manifests and sizes, the newest first: here, or else in the mirror. Rank 0."""
    checkpoints, mirror = checkpoints_folder(plan), plan.args.checkpoint_mirror
    wait_for_writers(checkpoints, timeout_s=plan.args.save_timeout, say=say)
    remove_leftovers(checkpoints)
    here = {step_of(folder): folder for folder in checkpoint_folders(checkpoints)}
    there: dict[int, str] = {}
    if mirror is not None:
        try:
            check_mirror(mirror)
            there = {step_of(Path(tag)): tag for tag in finished_in_mirror(mirror)}
        except ConfigError as error:
            yield str(error)  # the run goes on if there is a checkpoint here
    if plan.args.resume == "never":
        reject_overwrite([*here.values(), *(f"{mirror}/{tag}" for tag in there.values())])
    for step in sorted(here.keys() | there.keys(), reverse=True):
        if step in here:
            found = manifest_or_error(here[step])
            yield str(found) if isinstance(found, ConfigError) else (here[step], found.to_json())
        if step in there and mirror is not None:
            say(f"fetching {there[step]} from {mirror}")
            try:
                folder = fetch(mirror, checkpoints, there[step])
                yield folder, read_manifest(folder).to_json()
            except (ConfigError, SaveError) as error:
                yield str(error)


def _find_damage_together(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files, each hashed by one rank; the same list on every rank, as soon as all are done."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    mine = files_of_rank(sizes, rank, size)
    with ThreadPoolExecutor(1) as pool, Progress("verifying", sum(sizes[name] for name in mine),
                                                 active=rank == 0) as progress:
        hashing = pool.submit(find_damage, folder, manifest, mine, advance=progress.advance)
        wait_until_all(hashing.done)
        found = hashing.result()
    found += unexpected_files(folder, manifest) if rank == 0 else []
    try:
        if (folder / MANIFEST).read_text(encoding="utf-8") != manifest.to_json():
            found.append(f"{folder}: found another manifest on {gethostname()}; expected one folder that all share")
    except (OSError, ValueError) as error:
        found.append(f"{folder}: found no manifest on {gethostname()} ({error}); expected one folder that all share")
    return [line for lines in gather(found) for line in lines]


def _reject_foreign_pickles(folder: Path, manifest: Manifest) -> None:
    """Raises ConfigError, on every rank, where a file holds more than the allow-list of `pickles.py`."""
    sizes = {name: record.bytes for name, record in manifest.files.items() if name.endswith(".pt")}
    refused: list[str] = []
    for name in files_of_rank(sizes, dist.get_rank(), dist.get_world_size()):
        try:
            load_pickle(folder / name, mmap=True)
        except ConfigError as error:
            refused.append(str(error))
    for line in (line for lines in gather(refused) for line in lines):
        raise ConfigError.from_line(line)
