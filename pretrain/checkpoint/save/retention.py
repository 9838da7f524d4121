"""Retention of a run's checkpoints: the rules for old ones, and rollbacks, which abandon some. Imports no torch.

A rollback returns the run to an earlier checkpoint and skips samples. The checkpoints after that one belong to an
abandoned path: they move to `checkpoints/abandoned-N/`, in which no start looks for checkpoints. The record
`RUN/rollbacks.jsonl` is written first. A start finishes the moves that a killed run did not reach.
"""

import contextlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints, latest_name, manifest_or_error, step_of
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save.commit import TEMPORARY, write_latest
from pretrain.errors import ConfigError, SaveError, file_errors
from pretrain.paths import fsync
from pretrain.stored_json import build, parse_json, read_text

_MIN_KEPT = 2  # checkpoints that are always kept, because one may be damaged later
ROLLBACKS = "rollbacks.jsonl"  # in the run folder: one line for each rollback of the whole run
ABANDONED = "abandoned-"  # prefix of folders in the checkpoints folder; then the number of the rollback
_REMEDY = "restore the file, or remove it: then the skipped samples may be read again"


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
        remove(folder, checkpoints)
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


def remove(folder: Path, checkpoints: Path) -> None:
    """Delete a checkpoint below the folder `checkpoints`. Rename it first, so that the deletion is atomic."""
    temporary = checkpoints / f"{TEMPORARY}pruned-{folder.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    folder.rename(temporary)
    fsync(checkpoints)
    shutil.rmtree(temporary)


@dataclass(frozen=True)
class Rollback:
    """One rollback: its reason, the checkpoint that the run returned to, and the data position from there."""

    time: float
    reason: str
    bad_step: int  # the first bad step
    last_step: int  # the last step before the rollback
    to_step: int
    save_id: str  # identifies the checkpoint of `to_step`
    first_sample: int  # samples [first_sample, consumed_samples) are skipped
    consumed_samples: int  # data position with which the run continues
    abandoned: dict[str, str]  # folder name -> save_id of each checkpoint of the abandoned path


def read_rollbacks(checkpoints: Path) -> list[Rollback]:
    """Return all rollbacks of the run, the oldest first. Raises ConfigError if the record is damaged."""
    path = checkpoints.parent / ROLLBACKS
    lines: list[str] = []
    with file_errors(path, "the record of rollbacks cannot be read: {}", _REMEDY, (OSError, ValueError)), \
            contextlib.suppress(FileNotFoundError):
        lines = read_text(path).splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        with file_errors(f"{path}:{number}", "the record of a rollback is damaged: {}", _REMEDY, (ValueError,)):
            found.append(build(Rollback, parse_json(line)))
    return found


def position_after(checkpoints: Path, manifest: Manifest) -> int:
    """Return the consumed samples with which a run continues from a checkpoint.

    They come from the manifest, or from the newest rollback to this checkpoint. Raises ConfigError.
    """
    positions = [manifest.consumed_samples]
    positions += [rollback.consumed_samples for rollback in read_rollbacks(checkpoints)
                  if (rollback.to_step, rollback.save_id) == (manifest.step, manifest.save_id)]
    return positions[-1]


def later_checkpoints(checkpoints: Path, step: int) -> dict[str, str]:
    """Return name -> save_id of the complete checkpoints after `step`."""
    return {folder.name: manifest.save_id for folder, manifest in complete_checkpoints(checkpoints)[0]
            if manifest.step > step}


def record_rollback(checkpoints: Path, rollback: Rollback) -> None:
    """Write the record durably, then move the checkpoints of the abandoned path. Rank 0 only. Raises OSError."""
    lines = [json.dumps(asdict(each)) for each in [*read_rollbacks(checkpoints), rollback]]
    write_atomically(checkpoints.parent / ROLLBACKS, "\n".join(lines) + "\n")
    write_latest(checkpoints / f"global_step{rollback.to_step}")  # plain DeepSpeed reads it
    move_abandoned(checkpoints)


def move_abandoned(checkpoints: Path) -> list[Path]:
    """Move the checkpoints of abandoned paths that are still among the others. Return their new folders.

    The record names them by save_id: a checkpoint that was saved after the rollback under the same name remains.
    """
    moved = []
    for number, rollback in enumerate(read_rollbacks(checkpoints), 1):
        for name, save_id in rollback.abandoned.items():
            found = manifest_or_error(checkpoints / name)
            if isinstance(found, ConfigError) or found.save_id != save_id:
                continue
            target = checkpoints / f"{ABANDONED}{number}" / name
            target.parent.mkdir(exist_ok=True)
            (checkpoints / name).rename(target)
            fsync(target.parent)
            fsync(checkpoints)
            moved.append(target)
    return moved


def abandoned_save_ids(checkpoints: Path) -> set[str]:
    """Return the save_ids of all checkpoints of abandoned paths; a mirror may still have copies of them."""
    return {save_id for rollback in read_rollbacks(checkpoints) for save_id in rollback.abandoned.values() if save_id}


def remove_abandoned(checkpoints: Path, *, up_to_step: int) -> list[Path]:
    """Remove and return the abandoned checkpoints up to a step: the run has reached this step on another path."""
    removed = []
    for folder in sorted(checkpoints.glob(f"{ABANDONED}*/global_step*")):
        if 0 <= step_of(folder) <= up_to_step:
            remove(folder, checkpoints)
            removed.append(folder)
            with contextlib.suppress(OSError):  # it holds other checkpoints
                folder.parent.rmdir()
    return removed
