"""Advice in the list of what went wrong in a run: a replay of the step."""

from pathlib import Path

from pretrain.analysis.incidents import incidents_of
from pretrain.analysis.run_table import RunTable
from tests.support.run_folders import START, event, rows_of, write_run


def test_a_replay_is_advised_for_spikes_and_different_results(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of(list(range(1, 101))), [
        event("start", 0), event("spike", 46, "a spike of the loss", name="loss"), event("recomputation", 50, "x")])
    different, spike = incidents_of(RunTable(run), now=START + 101 * 0.4)
    assert f"ds-pretrain replay {run}@46" in spike.advice
    assert different.advice.startswith("do not trust the machine; `ds-pretrain replay")
