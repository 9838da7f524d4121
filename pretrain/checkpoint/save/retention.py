"""Which checkpoints stay. Nothing is removed before the two newest that stay have been read and found whole."""

import shutil
from pathlib import Path

from pretrain.checkpoint.format.files import fsync
from pretrain.checkpoint.format.manifest import LATEST, Manifest, complete_checkpoints
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save.commit import TEMPORARY
from pretrain.errors import SaveError

_LEAST = 2  # checkpoints that always stay: one may be damaged later


def prune(checkpoints: Path, *, keep_checkpoints: int, keep_every: int, keep_best: int,
          verified: set[str]) -> list[Path]:
    """Remove all checkpoints that no rule keeps, the oldest first; those that were removed. Rank 0 only.

    Kept are the newest `keep_checkpoints` (at least two; 0: all are kept), those whose step is a multiple of
    `keep_every` (0: off), the `keep_best` of lowest validation loss, and the one that `latest` names. Folders that are
    no whole checkpoints are not touched. `verified` has the names of checkpoints that need not be hashed again; those
    that are found whole are added to it. Raises SaveError, with nothing removed, where one of the two newest that would
    stay is damaged.
    """
    if keep_checkpoints == 0:
        return []
    whole, _ = complete_checkpoints(checkpoints)
    kept = _kept(whole, keep_checkpoints, keep_every, keep_best) | {_latest(checkpoints)}
    removed = [folder for folder, _ in reversed(whole) if folder.name not in kept]
    if removed:
        _verify([found for found in whole if found[0].name in kept][:_LEAST], verified)
    for folder in removed:
        remove(folder)
        verified.discard(folder.name)
    return removed


def _kept(whole: list[tuple[Path, Manifest]], keep_checkpoints: int, keep_every: int, keep_best: int) -> set[str]:
    """`whole` is sorted, the newest first. Of equal losses the newer is better."""
    newest = {folder.name for folder, _ in whole[:max(keep_checkpoints, _LEAST)]}
    regular = {folder.name for folder, manifest in whole if keep_every > 0 and manifest.step % keep_every == 0}
    judged = [(manifest.eval_loss, folder.name) for folder, manifest in whole if manifest.eval_loss is not None]
    best = {name for _, name in sorted(judged, key=lambda pair: pair[0])[:keep_best]}
    return newest | regular | best


def _latest(checkpoints: Path) -> str:
    """What `latest` names: after a step back it is not among the newest."""
    try:
        return (checkpoints / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _verify(newest: list[tuple[Path, Manifest]], verified: set[str]) -> None:
    for folder, manifest in newest:
        if folder.name not in verified:
            complaints = find_damage(folder, manifest)
            if complaints:
                raise SaveError(f"no checkpoint was removed, because one that would stay is damaged: {complaints[0]}")
            verified.add(folder.name)


def remove(folder: Path) -> None:
    """Away at once, so that a kill leaves no half checkpoint; then its files."""
    temporary = folder.with_name(f"{TEMPORARY}pruned-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    fsync(folder.parent)
    shutil.rmtree(temporary)
