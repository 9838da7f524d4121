"""All ranks choose the checkpoint to go on from together: rank 0 proposes, each verifies a share of its files."""

from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any

import torch.distributed as dist

from pretrain.check import Plan
from pretrain.checkpoint.commit import SaveError, remove_leftovers
from pretrain.checkpoint.manifest import Manifest, read_manifest, whole_checkpoints
from pretrain.checkpoint.mirror import check_mirror, fetch, newest_in_mirror
from pretrain.checkpoint.pickles import load_pickle
from pretrain.checkpoint.resume import Resume, checkpoints_of, judged
from pretrain.checkpoint.verify import damage, foreign, share
from pretrain.checkpoint.writer import wait_for_writers
from pretrain.errors import ConfigError

Say = Callable[[str], None]
Offer = tuple[list[tuple[Path, str]], list[str]]  # folders with their manifest.json, newest first; what is wrong


def agree_on_checkpoint(plan: Plan, say: Say) -> Resume | None:
    """The newest checkpoint whose files have the hashes of its manifest; None: begin at step 0. Collective.

    Raises ConfigError, on every rank, where there are checkpoints and none is whole, or where this run cannot go on
    from the newest whole one.
    """
    whole, complaints = _from_rank_0(lambda: _prepare(plan, say))
    for folder, text in whole:
        found = _damage_together(folder, Manifest.from_json(text))
        if not found:
            _refuse_foreign_pickles(folder, Manifest.from_json(text))
            return judged(folder, Manifest.from_json(text), complaints, plan)
        complaints = [*complaints, *found]
    if complaints:
        raise ConfigError(str(checkpoints_of(plan)), found=f"no whole checkpoint ({complaints[0]})",
                          expected="at least one whole checkpoint", remedy="restore one, or choose another --save")
    if plan.args.resume == "required":
        raise ConfigError("--resume required", found="no checkpoint", expected="at least one",
                          remedy="--resume auto begins at step 0")
    return None


def _prepare(plan: Plan, say: Say) -> Offer:
    """What there is to go on from, by manifests and sizes. Rank 0."""
    checkpoints = checkpoints_of(plan)
    for writer in wait_for_writers(checkpoints, timeout_s=plan.args.save_timeout):
        say(f"warning: {writer}: a background writer of an earlier run is still at work")
    remove_leftovers(checkpoints)
    whole, complaints = whole_checkpoints(checkpoints)
    mirror = plan.args.checkpoint_mirror
    if mirror is not None:
        check_mirror(mirror)
    newest = newest_in_mirror(mirror) if mirror is not None and plan.args.resume != "never" else None
    if mirror is not None and newest is not None and (not whole or newest[1].step > whole[0][1].step):
        say(f"fetching {newest[0]} from {mirror}")
        fetch(mirror, checkpoints, newest[0])
        whole, complaints = whole_checkpoints(checkpoints)
    return [(folder, manifest.to_json()) for folder, manifest in whole], complaints


def _damage_together(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files, each hashed by one rank; the same list on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = share({name: record.bytes for name, record in manifest.files.items()}, rank, size)
    found = damage(folder, manifest, names=mine) + (foreign(folder, manifest) if rank == 0 else [])
    try:
        if read_manifest(folder) != manifest:
            found.append(f"{folder}: found another manifest on {gethostname()}; expected one folder that all share")
    except ConfigError as error:
        found.append(f"{gethostname()}: {error}")
    everywhere: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(everywhere, found)
    return [line for lines in everywhere for line in lines]


def _refuse_foreign_pickles(folder: Path, manifest: Manifest) -> None:
    """Raises ConfigError, on every rank, where a file holds more than the allow-list of `pickles.py`."""
    sizes = {name: record.bytes for name, record in manifest.files.items() if name.endswith(".pt")}
    refused: list[str] = []
    for name in share(sizes, dist.get_rank(), dist.get_world_size()):
        try:
            load_pickle(folder / name, mmap=True)
        except ConfigError as error:
            refused.append(str(error))
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, refused)
    for line in (line for lines in everywhere for line in lines):
        raise ConfigError.of_line(line)


def _from_rank_0(action: Callable[[], Offer]) -> Offer:
    """What `action` returns on rank 0, or the ConfigError that it raises, on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [action(), None]
        except (ConfigError, SaveError, OSError) as error:
            outcome = [None, str(error)]
    dist.broadcast_object_list(outcome, src=0)
    offer, refusal = outcome
    if refusal is not None:
        raise ConfigError.of_line(refusal)
    return offer
