"""The record of a run's rollbacks, and the checkpoints of abandoned paths. Imports no torch.

A rollback returns the run to an earlier checkpoint and skips samples. The checkpoints after that one belong to an
abandoned path: they move to `checkpoints/abandoned-N/`, in which no start looks for checkpoints. The record
`RUN/rollbacks.jsonl` is written first. A start finishes the moves that a killed run did not reach.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrain.checkpoint.format.files import write_atomically
from pretrain.checkpoint.format.manifest import Manifest, complete_checkpoints, manifest_or_error, step_of
from pretrain.checkpoint.save.commit import TEMPORARY, write_latest
from pretrain.errors import ConfigError
from pretrain.stored_json import build, parse_json, read_text, reason_of
from pretrain.sync import fsync

ROLLBACKS = "rollbacks.jsonl"  # in the run folder: one line for each rollback of the whole run
ABANDONED = "abandoned-"  # prefix of folders in the checkpoints folder; then the number of the rollback


@dataclass(frozen=True)
class Rollback:
    """One rollback: its reason, the checkpoint that the run returned to, and the data position from there."""

    time: float
    reason: str
    bad_step: int  # the first bad step
    last_step: int  # the last step before the rollback
    to_step: int
    save_id: str  # of the checkpoint of `to_step`
    first_sample: int  # samples [first_sample, consumed_samples) are skipped
    consumed_samples: int  # data position with which the run continues
    abandoned: dict[str, str]  # folder name -> save_id of each checkpoint of the abandoned path


def read_rollbacks(checkpoints: Path) -> list[Rollback]:
    """Return all rollbacks of the run, the oldest first. Raises ConfigError if the record is damaged."""
    path = checkpoints.parent / ROLLBACKS
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), problem=f"the record of rollbacks cannot be read: {reason_of(error)}",
                          remedy=_REMEDY) from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(build(Rollback, parse_json(line)))
        except ValueError as error:
            raise ConfigError(f"{path}:{number}", problem=f"the record of a rollback is damaged: {error}",
                              remedy=_REMEDY) from None
    return found


_REMEDY = "restore the file, or remove it: then the skipped samples may be read again"


def position_after(checkpoints: Path, manifest: Manifest) -> int:
    """Return the consumed samples with which a run continues from a checkpoint.

    They are those of the manifest, or of the newest rollback to this checkpoint. Raises ConfigError.
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
    write_latest(checkpoints / f"global_step{rollback.to_step}")  # for plain DeepSpeed
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
            temporary = checkpoints / f"{TEMPORARY}{folder.parent.name}-{folder.name}"
            shutil.rmtree(temporary, ignore_errors=True)
            folder.rename(temporary)  # first, so that the deletion is atomic
            shutil.rmtree(temporary, ignore_errors=True)
            removed.append(folder)
    _remove_empty(folder.parent for folder in removed)
    return removed


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in sorted(set(folders)):
        if not any(folder.iterdir()):
            folder.rmdir()
