"""Record of a supervised run: the steps of each start, and its committed checkpoints."""

import threading
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints, step_of
from pretrain.checkpoint.format.verify import find_damage
from pretrain.monitor.read_run_folder import read_events, read_metrics

Key = tuple[int, str]  # step and save_id: the same step may be saved again after a restart
_MIN_KEPT = 2  # pretrain/checkpoint/save/retention.py keeps at least this number


class RunWatch:
    """Rows of metrics.jsonl, by start. The supervisor's thread calls `mark_start`; another thread reads."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._first_rows: list[int] = []  # number of steps that were logged before each start

    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of training steps, of all starts."""
        return [row for row in read_metrics(self.run) if "step_time_ms" in row]

    def mark_start(self) -> None:
        """Record that a start begins now."""
        self._first_rows.append(len(self.steps()))

    @property
    def num_starts(self) -> int:
        return len(self._first_rows)

    def steps_of_start(self, start: int) -> list[dict[str, Any]]:
        """Return the rows of training steps of start number `start`, from 1."""
        return self.steps()[slice(*[*self._first_rows, None][start - 1:start + 1])]

    def current_step(self) -> int:
        """Return the last step that the current start has logged; 0 if it has logged none."""
        rows = self.steps_of_start(self.num_starts) if self.num_starts else []
        return int(rows[-1]["step"]) if rows else 0


class CheckpointLedger:
    """Records which checkpoints were committed, which the faults damaged, and which are lost. Two threads use it."""

    def __init__(self, run: Path, *, keep_checkpoints: int) -> None:
        self._run, self._keep = run, keep_checkpoints
        self._seen: set[Key] = set()
        self._damaged: set[Key] = set()
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        return self._run / "checkpoints"

    def observe(self) -> list[tuple[Path, Manifest]]:
        """Record the checkpoints that exist now. Return those that no fault has damaged, newest first."""
        with self._lock:
            complete, _ = complete_checkpoints(self.folder)
            self._seen |= {_key(manifest) for _, manifest in complete}
            return [found for found in complete if _key(found[1]) not in self._damaged]

    def mark_damaged(self, manifest: Manifest) -> None:
        """Record that a fault damages this checkpoint."""
        with self._lock:
            self._damaged.add(_key(manifest))

    def lost(self) -> list[str]:
        """Return a line for each checkpoint that no longer exists or is damaged, though no fault damaged it.

        Call it after the run has ended. Hashes all files of the remaining ones.
        """
        intact = self.observe()
        lost = [f"checkpoint of step {manifest.step} is lost: {problems[0]}" for folder, manifest in intact
                if (problems := find_damage(folder, manifest))]
        pruned = {step_of(Path(row["path"])) for row in read_events(self._run)
                  if row.get("event") == "prune" and isinstance(row.get("path"), str)}
        good = self._seen - self._damaged
        for key in sorted(good - {_key(manifest) for _, manifest in intact}):
            step = key[0]
            replaced = any(other[0] == step and other != key for other in good)
            if not replaced and step not in pruned and not self._may_be_pruned(step, good):
                lost.append(f"checkpoint of step {step} is lost: it has disappeared")
        return lost

    def _may_be_pruned(self, step: int, good: set[Key]) -> bool:
        """Return whether --keep_checkpoints allowed the removal; the event is missing if the run was killed then."""
        newer = {other for other, _ in good if other > step}
        return self._keep > 0 and len(newer) >= max(self._keep, _MIN_KEPT)


def _key(manifest: Manifest) -> Key:
    return manifest.step, manifest.save_id
