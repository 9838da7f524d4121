"""The record of rollbacks: it survives kills at every point, and abandoned checkpoints are never chosen again."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import LATEST_FILE, newest_good, read_manifest
from pretrain.checkpoint.save import retention
from pretrain.checkpoint.save.mirror import fetch, finish_upload, mirrored_checkpoints, upload, withdraw
from pretrain.checkpoint.save.retention import (
    Rollback,
    abandoned_save_ids,
    later_checkpoints,
    move_abandoned,
    position_after,
    prune,
    read_rollbacks,
    record_rollback,
)
from pretrain.errors import ConfigError
from tests.checkpoint.test_commit import save


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Save checkpoints of the steps 1 to 5."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in range(1, 6):
        save_step(folder, step, f"first{step}")
    return folder


def save_step(checkpoints: Path, step: int, save_id: str) -> None:
    folder = save(checkpoints, step, num_bytes=100)
    (folder / MANIFEST).write_text(replace(read_manifest(folder), save_id=save_id).to_json())


def rollback_to(checkpoints: Path, step: int, *, consumed_samples: int = 99) -> Rollback:
    manifest = read_manifest(checkpoints / f"global_step{step}")
    return Rollback(time=1.0, reason="a spike", bad_step=5, last_step=5, to_step=step, save_id=manifest.save_id,
                    first_sample=manifest.consumed_samples, consumed_samples=consumed_samples,
                    abandoned=later_checkpoints(checkpoints, step))


def test_later_checkpoints_move_and_the_position_is_kept(checkpoints: Path) -> None:
    record_rollback(checkpoints, rollback_to(checkpoints, 3))
    newest = newest_good(checkpoints)
    assert newest is not None
    assert newest[1].step == 3
    assert (checkpoints / LATEST_FILE).read_text() == "global_step3"
    assert sorted(path.name for path in (checkpoints / "abandoned-1").iterdir()) == ["global_step4", "global_step5"]
    assert read_manifest(checkpoints / "abandoned-1" / "global_step4").save_id == "first4"  # tools can read it
    assert position_after(checkpoints, newest[1]) == 99
    older = read_manifest(checkpoints / "global_step2")
    assert position_after(checkpoints, older) == older.consumed_samples
    assert len(read_rollbacks(checkpoints)) == 1


@pytest.mark.parametrize("moves", [0, 1])
def test_a_start_finishes_the_moves_of_a_killed_run(checkpoints: Path, moves: int,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    rename, done = Path.rename, []

    def rename_or_die(self: Path, target: Path) -> Path:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_or_die)
    with pytest.raises(KeyboardInterrupt):
        record_rollback(checkpoints, rollback_to(checkpoints, 3))
    monkeypatch.undo()
    assert len(read_rollbacks(checkpoints)) == 1, "the record is written before the moves"
    assert len(move_abandoned(checkpoints)) == 2 - moves
    assert sorted(later_checkpoints(checkpoints, 0)) == ["global_step1", "global_step2", "global_step3"]
    assert move_abandoned(checkpoints) == []


def test_a_kill_before_the_record_changes_nothing(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path, text: str) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(retention, "write_atomically", full_disk)
    with pytest.raises(OSError, match="No space"):
        record_rollback(checkpoints, rollback_to(checkpoints, 3))
    assert read_rollbacks(checkpoints) == []
    assert len(later_checkpoints(checkpoints, 0)) == 5


def test_a_new_save_of_an_abandoned_step_is_not_moved(checkpoints: Path) -> None:
    record_rollback(checkpoints, rollback_to(checkpoints, 3))
    save_step(checkpoints, 4, "second4")
    assert move_abandoned(checkpoints) == []
    record_rollback(checkpoints, rollback_to(checkpoints, 2, consumed_samples=200))
    assert {path.name: read_manifest(path).save_id for path in (checkpoints / "abandoned-2").iterdir()} == {
        "global_step3": "first3", "global_step4": "second4"}
    assert abandoned_save_ids(checkpoints) == {"first3", "first4", "first5", "second4"}


def test_abandoned_checkpoints_are_removed_once_the_run_has_passed_them(checkpoints: Path) -> None:
    record_rollback(checkpoints, rollback_to(checkpoints, 3))
    keep = {"keep_checkpoints": 2, "keep_every": 0, "keep_best": 0}
    prune(checkpoints, **keep, verified=set())
    assert len(list((checkpoints / "abandoned-1").iterdir())) == 2
    save_step(checkpoints, 4, "second4")
    prune(checkpoints, **keep, verified=set())
    assert [path.name for path in (checkpoints / "abandoned-1").iterdir()] == ["global_step5"]
    save_step(checkpoints, 5, "second5")
    prune(checkpoints, **keep, verified=set())
    assert not (checkpoints / "abandoned-1").exists()
    assert sorted(later_checkpoints(checkpoints, 0)) == ["global_step4", "global_step5"]


def test_the_mirror_gives_no_abandoned_checkpoints(checkpoints: Path, tmp_path: Path) -> None:
    mirror = str(tmp_path / "mirror")
    for folder in sorted(checkpoints.glob("global_step*")):
        manifest = read_manifest(folder)
        for rank in range(manifest.world_size):
            upload(folder, mirror, list(manifest.files) if rank == 0 else [], rank=rank, save_id=manifest.save_id)
        finish_upload(folder, mirror)
    rollback = rollback_to(checkpoints, 3)
    record_rollback(checkpoints, rollback)
    kept = ["global_step3", "global_step2", "global_step1"]
    assert mirrored_checkpoints(mirror)[0] == "global_step5"  # for example because the server did not answer
    assert mirrored_checkpoints(mirror, abandoned_save_ids(checkpoints)) == kept
    withdraw(mirror, rollback.abandoned)
    assert mirrored_checkpoints(mirror) == kept
    shutil.rmtree(checkpoints / "global_step3")
    assert read_manifest(fetch(mirror, checkpoints, "global_step3")).save_id == "first3"


@pytest.mark.parametrize("text", ["{", "[]\n", '{"time": 1}\n', "1\n", "\xff"])
def test_a_damaged_record_is_one_line(checkpoints: Path, text: str) -> None:
    path = checkpoints.parent / "rollbacks.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"rollbacks.jsonl.*remove it"):
        read_rollbacks(checkpoints)
