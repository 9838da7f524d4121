"""Ledger of the checkpoints of a run: which were committed, which the faults damaged, and which are lost."""

import threading
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format.manifest import Manifest, step_of
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints
from pretrain.checkpoint.format.verify import find_damage
from pretrain.monitor.read_run_folder import read_rows

Key = tuple[int, str]  # step and save_id: the same step may be saved again after a restart
_MIN_KEPT = 2  # pretrain/checkpoint/save/retention.py keeps at least this number


@dataclass(frozen=True)
class LostCheckpoint:
    """A committed checkpoint that no longer exists or is damaged, though no fault damaged it."""

    step: int
    bytes: int
    reason: str


class CheckpointLedger:
    """Records every committed checkpoint. Two threads use it."""

    def __init__(self, run: Path, *, keep_checkpoints: int) -> None:
        self._run, self._keep = run, keep_checkpoints
        self._bytes: dict[Key, int] = {}  # of every checkpoint that was seen, in this order
        self._damaged: set[Key] = set()
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        return self._run / "checkpoints"

    def observe(self) -> list[tuple[Path, Manifest]]:
        """Record the checkpoints that exist now. Return those that no fault has damaged, newest first."""
        with self._lock:
            complete, _ = complete_checkpoints(self.folder)
            for _, manifest in complete:
                self._bytes.setdefault(_key(manifest), sum(record.bytes for record in manifest.files.values()))
            return [found for found in complete if _key(found[1]) not in self._damaged]

    def mark_damaged(self, manifest: Manifest) -> None:
        """Record that a fault damages this checkpoint."""
        with self._lock:
            self._damaged.add(_key(manifest))

    def lost(self) -> list[LostCheckpoint]:
        """Return the lost checkpoints. Call it after the run has ended. Hashes all files of the remaining ones."""
        intact = self.observe()
        lost = [LostCheckpoint(manifest.step, self._bytes[_key(manifest)], problems[0]) for folder, manifest in intact
                if (problems := find_damage(folder, manifest))]
        pruned = {step_of(Path(row["path"])) for row in read_rows(self._run / "events.jsonl")
                  if row.get("event") == "prune" and isinstance(row.get("path"), str)}
        existing = {_key(manifest) for _, manifest in intact}
        good = [key for key in self._bytes if key not in self._damaged]
        for step, save_id in good:
            key = (step, save_id)
            replaced = any(other[0] == step and other != key for other in good)
            if key not in existing and not replaced and step not in pruned and not self._may_be_pruned(step, good):
                lost.append(LostCheckpoint(step, self._bytes[key], "it has disappeared"))
        return lost

    def _may_be_pruned(self, step: int, good: list[Key]) -> bool:
        """Return whether --keep_checkpoints allowed the removal; the event is missing if the run was killed then."""
        newer = {other for other, _ in good if other > step}
        return self._keep > 0 and len(newer) >= max(self._keep, _MIN_KEPT)


def _key(manifest: Manifest) -> Key:
    return manifest.step, manifest.save_id
