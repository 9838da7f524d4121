"""Results of a chaos run: it fails if a checkpoint was lost, or if a loss or the final weights are wrong."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pretrain.checkpoint.format.manifest import read_manifest
from pretrain.checkpoint.format.run_checkpoints import checkpoint_folders
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save.retention import remove
from pretrain.errors import ConfigError
from tests.chaos.checkpoints import CheckpointLedger
from tests.chaos.damage import LinkedData, damage_checkpoint, damage_latest
from tests.chaos.faults import CHECKPOINT_DAMAGE
from tests.chaos.injector import AppliedFault
from tests.chaos.results import ChaosResult, count_by_kind, reference_rows, steps_lost, wrong_rows
from tests.chaos.watch import RunWatch
from tests.support.launch import ROOT

STEPS = 3


def row(step: int, loss: float | None = 1.0) -> str:
    return json.dumps({"step": step, "loss": loss, "grad_norm": 0.5, "step_time_ms": 1000.0}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with complete checkpoints of the steps 1 to 3: copies of a recorded one."""
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.unpack_archive(ROOT / "tests" / "golden" / "checkpoint.tar.xz", checkpoints)
    recorded = checkpoints / f"global_step{STEPS}"
    for step in range(1, STEPS):
        copied = shutil.copytree(recorded, checkpoints / f"global_step{step}")
        (copied / "manifest.json").write_text(replace(read_manifest(recorded), step=step).to_json())
    return tmp_path / "run"


def test_a_checkpoint_that_disappears_is_lost_unless_retention_may_remove_it(run: Path) -> None:
    folders = checkpoint_folders(run / "checkpoints")
    ledgers = {keep: CheckpointLedger(run, keep_checkpoints=keep) for keep in (0, 2, 3)}
    for ledger in ledgers.values():
        assert len(ledger.observe()) == STEPS
    size = sum(record.bytes for record in read_manifest(folders[2]).files.values())
    remove(folders[2], folders[2].parent)  # step 1, with two newer ones
    lost = {keep: [(each.step, each.bytes) for each in ledger.lost()] for keep, ledger in ledgers.items()}
    assert lost == {0: [(1, size)], 2: [], 3: [(1, size)]}
    (run / "events.jsonl").write_text(json.dumps({"event": "prune", "path": str(folders[2])}) + "\n")
    assert [ledger.lost() for ledger in ledgers.values()] == [[], [], []]
    remove(folders[0], folders[0].parent)
    assert [each.step for each in ledgers[2].lost()] == [3]


def test_a_damaged_checkpoint_is_lost_unless_a_fault_damaged_it(run: Path) -> None:
    ledger = CheckpointLedger(run, keep_checkpoints=0)
    (newest, manifest), (second, _), _ = ledger.observe()
    ledger.mark_damaged(manifest)
    damage_checkpoint("bit_flip", newest, manifest, Random(0))
    assert next(folder for folder, _ in ledger.observe()) == second
    assert ledger.lost() == []
    damage_checkpoint("bit_flip", second, read_manifest(second), Random(1))
    assert [each.step for each in ledger.lost()] == [2]


@pytest.mark.parametrize("kind", CHECKPOINT_DAMAGE)
def test_every_damage_is_noticed(run: Path, kind: str) -> None:
    for seed, folder in enumerate(checkpoint_folders(run / "checkpoints")):
        manifest = read_manifest(folder)
        what = damage_checkpoint(kind, folder, manifest, Random(seed))
        with contextlib.suppress(ConfigError):
            assert read_manifest(folder) != manifest or find_damage(folder, manifest), what
    damage_latest(run / "checkpoints", Random(0))
    assert (run / "checkpoints" / "latest").read_bytes() != f"global_step{STEPS}".encode()


def test_training_data_is_truncated_through_a_link_only(corpus: str, tmp_path: Path) -> None:
    before = Path(f"{corpus}.bin").read_bytes()
    data = LinkedData(corpus, tmp_path)
    linked = Path(f"{data.prefix}.bin")
    assert linked.read_bytes() == before
    data.truncate()
    assert 0 < linked.stat().st_size < len(before) == Path(f"{corpus}.bin").stat().st_size
    assert data.restore()
    assert linked.read_bytes() == before == Path(f"{corpus}.bin").read_bytes()
    assert not data.restore()


def watched(run: Path, starts: list[str]) -> RunWatch:
    """Return a watch of a run whose starts have written these rows."""
    run.mkdir(parents=True, exist_ok=True)
    watch = RunWatch(run)
    for text in starts:
        watch.mark_start()
        with open(run / "metrics.jsonl", "a") as file:
            file.write(text)
        watch.poll()
    return watch


def test_recoveries_repeated_steps_and_wrong_steps(tmp_path: Path) -> None:
    watch = watched(tmp_path, [row(1) + row(2) + row(3), row(3, loss=None) + row(4), "", row(4) + row(5, loss=2.0)])
    first, last = (watch.steps_of_start(start)[-1].time for start in (1, 4))
    faults = [AppliedFault("kill_rank", first, 1, 3, ""), AppliedFault("data", first, 3, 4, ""),
              AppliedFault("signal", last + 1, 4, 5, ""), AppliedFault("hang", first, 1, 3, "", ended=False),
              AppliedFault("pause", last, 4, 4, "", applied=False)]
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "metrics.jsonl").write_text(
        "".join(row(step, None if step == 3 else 1.0) for step in range(1, 6)))
    wrong = wrong_rows(watch.steps(), reference_rows(tmp_path / "reference"))
    assert [each.values["step"] for each in wrong] == [3, 5]
    starts: list[dict[str, Any]] = [{"exit_code": 1}, {"exit_code": 75}, {"exit_code": 2}, {"exit_code": 0}]
    for complete in (False, True):
        kinds = count_by_kind(faults, [3], starts, watch, complete=complete)
        assert {name: (kind.faults, kind.recovered) for name, kind in kinds.items() if kind.faults} == {
            "kill_rank": (1, 1), "data": (1, 1), "signal": (1, int(complete)), "hang": (1, 0), "nan": (1, 1)}
    assert steps_lost(watch) == 2


def test_a_result_with_a_loss_is_a_failure() -> None:
    good = ChaosResult(seed=0, exit_code=0, kinds={}, faults=[], planned=0, steps=5, missing_steps=0, steps_lost=3,
                       wrong_steps=0, lost=[], goodput=0.5, hashes=("a", "a"))
    assert good.problems() == []
    for change in ({"exit_code": 76}, {"planned": 1}, {"missing_steps": 1}, {"hashes": ("a", "b")},
                   {"wrong_steps": 1}, {"failure": "no step for 900 s"}):
        assert len(replace(good, **change).problems()) == 1, change  # type: ignore[arg-type]
