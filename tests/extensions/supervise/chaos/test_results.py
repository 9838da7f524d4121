"""The tool that applies the faults: its schedule, the commands that it rejects, and results that it must not accept."""

import contextlib
import json
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pretrain.checkpoint.format.run_checkpoints import checkpoint_folders, read_manifest
from pretrain.checkpoint.format.verify import find_damage
from pretrain.checkpoint.save.retention import remove
from pretrain.errors import ConfigError
from tests.extensions.supervise.chaos.__main__ import parse
from tests.extensions.supervise.chaos.damage import LinkedData, damage_checkpoint
from tests.extensions.supervise.chaos.faults import CHECKPOINT_DAMAGE, KINDS, make_schedule
from tests.extensions.supervise.chaos.injector import AppliedFault
from tests.extensions.supervise.chaos.results import ChaosResult, count_by_kind
from tests.extensions.supervise.chaos.watch import CheckpointLedger, RunWatch
from tests.support.launch import ROOT
from tests.support.rejection import rejection

STEPS = 3


def test_all_kinds_of_faults_are_planned_equally_often_within_the_run() -> None:
    schedule, again, other = (make_schedule(tuple(KINDS), faults=200, seed=seed, train_steps=500) for seed in (3, 3, 4))
    assert schedule == again != other
    counts = Counter([*(fault.kind for fault in schedule.faults), *("nan" for _ in schedule.bad_steps)])
    assert (sum(counts.values()), counts.keys()) == (200, KINDS.keys())
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(1 <= fault.step <= 400 for fault in schedule.faults)
    steps = sorted(step for step, _ in schedule.bad_steps)
    assert all(second - first >= 2 for first, second in pairwise(steps))
    last_damage = max(at for at, fault in enumerate(schedule.faults) if KINDS[fault.kind].effect == "damages")
    assert "ends" in [KINDS[fault.kind].effect for fault in schedule.faults[last_damage:]], "a start ends after it"


@pytest.mark.parametrize(("words", "message"), [
    (["--", "ds-pretrain", "--train_steps", "9"], "--faults: 10 faults need at least 10 steps"),
    (["--kinds", "kill_rnak", "--", "ds-pretrain"], 'Did you mean "kill_rank"?'),
    (["--kinds", "hang", "--", "ds-pretrain"], "--step_timeout is 600 s"),
    (["--", "ds-pretrain", "--hostfile", "hosts"], "on this host only"),
    (["--", "ds-pretrain", "--save", "used"], "this folder has a run already"),
])
def test_wrong_commands_are_rejected(words: list[str], message: str, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("used-reference").mkdir()
    Path("used-reference/run.json").write_text("[]")
    train = ["--model", "tiny", "--train_data", "data/corpus", "--train_steps", "50", "--save", "run"]
    at = words.index("ds-pretrain") + 1
    assert message in rejection(parse, ["--faults", "10", *words[:at], *train, *words[at:]])


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
    remove(folders[2], folders[2].parent)  # step 1, with two newer ones
    lost = ["checkpoint of step 1 is lost: it has disappeared"]
    assert {keep: ledger.lost() for keep, ledger in ledgers.items()} == {0: lost, 2: [], 3: lost}
    (run / "events.jsonl").write_text(json.dumps({"event": "prune", "step": 3, "path": str(folders[2])}) + "\n")
    assert [ledger.lost() for ledger in ledgers.values()] == [[], [], []]


@pytest.mark.parametrize("kind", CHECKPOINT_DAMAGE)
def test_every_damage_is_noticed_and_is_a_loss_unless_a_fault_made_it(run: Path, kind: str) -> None:
    ledger = CheckpointLedger(run, keep_checkpoints=0)
    for seed, (folder, manifest) in enumerate(ledger.observe()):
        what = damage_checkpoint(kind, folder, manifest, Random(seed))
        with contextlib.suppress(ConfigError):
            assert read_manifest(folder) != manifest or find_damage(folder, manifest), what
        if seed < STEPS - 1:
            ledger.mark_damaged(manifest)
    assert [line.partition(" is lost")[0] for line in ledger.lost()] == ["checkpoint of step 1"]


def test_training_data_is_truncated_through_a_link_only(corpus: str, tmp_path: Path) -> None:
    before = Path(f"{corpus}.bin").read_bytes()
    data = LinkedData(corpus, tmp_path)
    linked = Path(f"{data.prefix}.bin")
    assert linked.read_bytes() == before
    data.truncate()
    assert 0 < linked.stat().st_size < len(before) == Path(f"{corpus}.bin").stat().st_size
    assert data.restore()
    assert linked.read_bytes() == before == Path(f"{corpus}.bin").read_bytes()


def test_recoveries_are_steps_after_the_fault(tmp_path: Path) -> None:
    watch = RunWatch(tmp_path)
    for steps in ([(1, 1.0), (2, 1.0), (3, 1.0)], [(3, None), (4, 1.0)], [], [(4, 1.0), (5, 2.0)]):
        watch.mark_start()
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.writelines(json.dumps({"step": step, "loss": loss, "step_time_ms": 1000.0}) + "\n"
                            for step, loss in steps)
    faults = [AppliedFault("kill_rank", 0, 1, 3, ""), AppliedFault("data", 0, 3, 5, ""),
              AppliedFault("signal", 0, 4, 7, ""), AppliedFault("hang", 0, 1, 3, "", ended=False),
              AppliedFault("pause", 0, 4, 5, "", applied=False)]
    starts: list[dict[str, Any]] = [{"exit_code": 1}, {"exit_code": 75}, {"exit_code": 2}, {"exit_code": 0}]
    for complete in (False, True):
        kinds = count_by_kind(faults, [3], starts, watch, complete=complete)
        assert {name: (*row.values(),) for name, row in kinds.items() if row["faults"]} == {
            "kill_rank": (1, 1), "data": (1, 1), "signal": (1, int(complete)), "hang": (1, 0), "nan": (1, 1)}
    assert watch.current_step() == 5


def test_a_result_with_a_loss_is_a_failure() -> None:
    good = ChaosResult(seed=0, exit_code=0, kinds={}, faults=[], planned=0, steps=5, missing_steps=0, wrong_steps=0,
                       lost=[], hashes=("a", "a"))
    assert good.problems() == []
    for change in ({"exit_code": 76}, {"planned": 1}, {"missing_steps": 1}, {"hashes": ("a", "b")},
                   {"wrong_steps": 1}, {"failure": "no step for 900 s"}, {"lost": ["checkpoint of step 1 is lost"]}):
        assert len(replace(good, **change).problems()) == 1, change  # type: ignore[arg-type]
