"""Remove old checkpoints, after verifying the two newest ones that remain."""

import shutil
from pathlib import Path

from pretrain.checkpoint.format.manifest import Manifest, complete_checkpoints, latest_name
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save.commit import TEMPORARY
from pretrain.checkpoint.save.rollbacks import remove_abandoned
from pretrain.errors import SaveError
from pretrain.sync import fsync

_MIN_KEPT = 2  # checkpoints that are always kept, because one may be damaged later


def prune(checkpoints: Path, *, keep_checkpoints: int, keep_every: int, keep_best: int,
          verified: set[str]) -> list[Path]:
    """Remove all checkpoints that no rule keeps, and return their folders. Rank 0 only.

    The checkpoint that `latest` names and imported weights are always kept. Folders that are not complete checkpoints
    are never removed. Checkpoints with NaN or infinity count for no rule, and are removed first. Only the newest of
    them remains until the next good checkpoint is saved, so that the failure can be studied. After a rollback, a
    checkpoint of the abandoned path is removed once the run has saved a good one of the same or a later step.

    Args:
        keep_checkpoints: keep this number of newest checkpoints, but at least two; 0: keep all.
        keep_every: keep checkpoints whose step is a multiple of this number; 0: off.
        keep_best: keep this number of checkpoints with the lowest validation loss.
        verified: names of checkpoints that were hashed before; newly hashed ones are added.

    Raises SaveError, and removes nothing, if one of the two newest checkpoints that would remain is damaged.
    """
    if keep_checkpoints == 0:
        return []
    complete, _ = complete_checkpoints(checkpoints)
    good = [found for found in complete if found[1].is_good]
    kept = _kept(good, keep_checkpoints, keep_every, keep_best)
    kept |= {folder.name for folder, _ in good if folder.name == latest_name(checkpoints)}
    if complete and not complete[0][1].is_good:
        kept.add(complete[0][0].name)
    removed = [folder for folder, manifest in sorted(complete, key=lambda found: (found[1].is_good, found[1].step))
               if folder.name not in kept]
    if removed:
        _verify([found for found in good if found[0].name in kept][:_MIN_KEPT], verified)
    for folder in removed:
        remove(folder)
        verified.discard(folder.name)
    return removed + remove_abandoned(checkpoints, up_to_step=good[0][1].step if good else -1)


def _kept(good: list[tuple[Path, Manifest]], keep_checkpoints: int, keep_every: int, keep_best: int) -> set[str]:
    """Return the names that the three rules keep, and imported weights. `good` is sorted newest first.

    If two losses are equal, `keep_best` prefers the newer checkpoint.
    """
    newest = {folder.name for folder, _ in good[:max(keep_checkpoints, _MIN_KEPT)]}
    # older programs did not record whether a checkpoint is finite: always keep one that is known to be
    newest |= {folder.name for folder, _ in [found for found in good if found[1].finite][:1]}
    regular = {folder.name for folder, manifest in good if keep_every > 0 and manifest.step % keep_every == 0}
    evaluated = [(manifest.eval_loss, folder.name) for folder, manifest in good if manifest.eval_loss is not None]
    best = {name for _, name in sorted(evaluated, key=lambda pair: pair[0])[:keep_best]}
    imported = {folder.name for folder, manifest in good if manifest.weights_only}  # no run can save these again
    return newest | regular | best | imported


def _verify(newest: list[tuple[Path, Manifest]], verified: set[str]) -> None:
    """Raise SaveError if one of these checkpoints is damaged; add the others to `verified`."""
    for folder, manifest in newest:
        if folder.name not in verified:
            problems = find_damage(folder, manifest)
            if problems:
                raise SaveError(f"no checkpoint was removed, because one that would be kept is damaged: {problems[0]}")
            verified.add(folder.name)


def remove(folder: Path) -> None:
    """Delete a checkpoint. Rename it first, so that the deletion is atomic."""
    temporary = folder.with_name(f"{TEMPORARY}pruned-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    fsync(folder.parent)
    shutil.rmtree(temporary)
