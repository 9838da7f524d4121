"""The event and the line for each change of the global batch size."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.callback import Run
from pretrain.data.token_schedules import BatchSizes, fixed_batch
from pretrain.monitor.announce import BatchRamp
from pretrain.monitor.read_run_folder import read_rows
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal import Screen
from tests.support.callback_runs import run_of

SIZES = BatchSizes(((0, 2), (5, 4), (12, 8)))  # steps begin at samples 0 2 4 | 6 10 | 14 22 ...
CHANGES = [(4, 4, 2, 6), (6, 8, 4, 14)]  # step, batch size, the one before, data position


def walk(folder: Path, sizes: BatchSizes, *, steps: range, position: int) -> int:
    """Do the steps as one process would. Returns the data position after them."""
    ramp, run = BatchRamp(), run_with(folder, sizes)
    for step in steps:
        run.step, run.consumed_samples = step, position
        ramp.begin_step(run)
        position += sizes.at(position)
    return position


def run_with(folder: Path, sizes: BatchSizes) -> Run:
    plan = SimpleNamespace(length=SimpleNamespace(batch_sizes=sizes))
    return run_of(plan, folder=RunFolder(folder, active=True), screen=Screen(active=True))


@pytest.mark.parametrize("resumed_at", range(1, 8))
def test_each_change_is_reported_once_wherever_the_run_resumes(resumed_at: int, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    position = walk(tmp_path, SIZES, steps=range(1, resumed_at), position=0)
    assert walk(tmp_path, SIZES, steps=range(resumed_at, 9), position=position) == 38
    rows = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "batch"]
    assert [(row["step"], row["global_batch_size"], row["before"], row["consumed_samples"]) for row in rows] == CHANGES
    assert "step 4: the global batch grows from 2 to 4 samples" in capsys.readouterr().out


def test_what_is_no_change_and_a_change_by_a_rollback(tmp_path: Path) -> None:
    """A fixed batch, and a run that begins in a later stage; samples that a rollback skips begin the next stage."""
    assert walk(tmp_path, fixed_batch(4), steps=range(1, 5), position=0) == 16
    assert walk(tmp_path, SIZES, steps=range(1, 3), position=6) == 14
    assert not (tmp_path / "events.jsonl").exists()
    ramp, run = BatchRamp(), run_with(tmp_path, SIZES)
    for position in (2, 12):
        run.step, run.consumed_samples = 2, position
        ramp.begin_step(run)
    assert [row["global_batch_size"] for row in read_rows(tmp_path / "events.jsonl")] == [8]
