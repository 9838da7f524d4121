"""Slow ranks in the list of what went wrong in a run."""

from pathlib import Path

from pretrain.analysis.incidents import incidents_of
from pretrain.analysis.run_table import RunTable
from tests.support.run_folders import START, event, rows_of, write_run

END = START + 101 * 0.4  # just after the rows


def test_ranks_that_are_slow_now_stand_before_those_that_were(tmp_path: Path) -> None:
    slow = {"ranks": [3], "hosts": ["node-b"], "kind": "compute", "ratio": 1.9}
    run = write_run(tmp_path / "run", rows_of(list(range(1, 101))), [
        event("start", 0), event("slow_rank", 70, since=62) | slow, event("slow_rank_over", 80) | slow,
        event("slow_rank", 90, since=88) | slow, event("store_wait", 95, "waited")])
    newest, wait, older = incidents_of(RunTable(run), now=END)
    assert [one.is_open for one in (newest, wait, older)] == [True, False, False]
    assert (newest.text, newest.steps_text) == ("rank 3 on node-b is slow: 1.9 times the others, probably compute",
                                                "since step 88")
    assert (older.text[:24], older.steps_text) == ("rank 3 on node-b was slo", "steps 62 to 80")
