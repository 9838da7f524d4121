"""What went wrong in a run, for the page and for `ds-pretrain summary`; and the heat map of ranks by time."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.analysis.report.incidents import incident_lines, incidents_of
from pretrain.analysis.report.page import page_html
from pretrain.analysis.report.page_data import page_data
from pretrain.analysis.report.rank_heat_map import COLUMNS, HIGHEST, LOWEST, ROWS, RankTimes
from pretrain.analysis.report.run_table import RunTable
from pretrain.analysis.summary import summarize, summary_lines
from pretrain.resilience.lease_file import Owner
from pretrain.resilience.run_lock import LOCK
from tests.analysis.report.runs import START, append_rows, event, record, rows_of, write_run
from tests.support.lock_race import write_lease

END = START + 101 * 0.4  # just after the rows


def kinds(run: Path, now: float = END) -> list[tuple[str, bool, int]]:
    """Return (kind, is it wrong now, number) of the list."""
    return [(one.kind, one.is_open, one.count) for one in incidents_of(RunTable(run), now=now)]


def test_what_is_wrong_now_stands_before_what_is_over(tmp_path: Path) -> None:
    spikes = [event("spike", step, f"a spike of the loss: {step}", name="loss") for step in range(10, 47)]
    slow = {"ranks": [3], "hosts": ["node-b"], "kind": "compute", "ratio": 1.9}
    run = write_run(tmp_path / "run", rows_of(list(range(1, 101))), [
        event("start", 0), *spikes, event("save_failed", 50, "No space left"), event("save", 60),
        event("slow_rank", 70, since=62) | slow, event("slow_rank_over", 80) | slow,
        event("off_curve", 85, "above"), event("slow_rank", 90, since=88) | slow, event("store_wait", 95, "waited")])
    assert kinds(run) == [("slow_rank", True, 1), ("off_curve", True, 1), ("store_wait", False, 1),
                          ("slow_rank", False, 1), ("save_failed", False, 1), ("spike", False, 37)]
    newest, *_, older, saved, spike = incidents_of(RunTable(run), now=END)
    assert (newest.text, newest.steps_text) == ("rank 3 on node-b is slow: 1.9 times the others, probably compute",
                                                "since step 88")
    assert (older.text[:24], older.steps_text) == ("rank 3 on node-b was slo", "steps 62 to 80")
    assert spike.headline == "37 times, most recently: a spike of the loss: 46"
    assert (spike.steps_text, saved.advice) == ("steps 10 to 46", "")
    assert f"ds-pretrain replay {run}@46" in spike.advice
    append_rows(run / "events.jsonl", [event("stop", 100, "finished")])
    assert not any(is_open for _, is_open, _ in kinds(run))


def test_crashes_are_those_of_the_supervisor_and_starts_without_an_end(tmp_path: Path) -> None:
    """Starts of the same run: one that a supervisor saw crash, one that hung, one killed without a supervisor."""
    run = write_run(tmp_path / "run", rows_of(list(range(1, 91))), [
        event("start", 0), event("start", 25), event("hang", 40, "rank 1 is stopped (SIGSTOP)", ranks=[1], path="h/1"),
        event("start", 41), event("start", 60)])
    base = {"first_step": 0, "kept_step": 20, "productive_seconds": 1, "hosts": ["a"]}
    append_rows(run / "restarts.jsonl", [
        {**base, "time": START - 1, "start": 1, "exit_code": 247, "reason": "crash: SIGKILL (exit code 247)",
         "last_step": 22, "wall_seconds": 10},
        {**base, "time": START + 9.5, "start": 2, "exit_code": 77, "reason": "hang: rank 1", "last_step": 40,
         "wall_seconds": 6.7},
        {"time": 1, "summary": "x"}, {"start": 1, "time": "x"}, {"start": 3, "time": 1e400}])
    found = incidents_of(RunTable(run), now=END)
    assert [(one.kind, one.step, one.is_open) for one in found] == [
        ("crash", 59, False), ("hang", 40, False), ("crash", 22, False)]
    assert "resumed from step 60" in found[0].text
    assert "start the run again" not in found[0].advice  # it was
    assert (found[1].machine, found[2].text) == ("rank 1", "the run crashed: SIGKILL (exit code 247); newest "
                                                   "checkpoint: step 20")
    assert "h/1" in found[1].advice
    assert kinds(run, now=END + 3600)[0] == ("silent", True, 1)
    write_lease(run / LOCK, Owner(pid=2**22 - 1))  # a process that does not run
    (newest, *_) = incidents_of(RunTable(run), now=END)
    assert (newest.kind, newest.is_open, "the run is dead" in newest.text) == ("crash", True, True)
    assert "start the run again" in newest.advice


def test_a_loss_that_ends_in_nan_is_wrong_now(tmp_path: Path) -> None:
    rows = [{**row, "loss": None} if row["step"] > 7 and "loss" in row else row for row in rows_of(list(range(1, 10)))]
    (one,) = incidents_of(RunTable(write_run(tmp_path / "run", rows)), now=START + 4)
    assert (one.kind, one.step, one.last_step, one.is_open) == ("not_finite", 8, 9, True)


def test_the_summary_lists_the_same_in_80_columns(tmp_path: Path) -> None:
    text, where = "\x1b[2J" + "long words " * 20, {"ranks": list(range(99)), "hosts": ["h" * 99]}
    events = [event("start", 0), *(event(kind, 3, text, **where)
                                   for kind in ("corruption", "hang", "recomputation", "rollback", "skip", "spike",
                                                "save_failed", "data_changed", "tasks_failed", "store_wait"))]
    run = write_run(tmp_path / "run", rows_of([1, 2, 3]), [*events, event("stop", 3, "x", exit_code=76)])
    summary = summarize(run)
    lines = incident_lines(summary.incidents)
    assert lines[0] == "what went wrong (! = still wrong)"
    assert sum(line.startswith("! ") for line in lines) == 5
    assert lines[-1] == "  and 3 more, in the page of `ds-pretrain report`"
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    assert summary_lines(summary)[-len(lines):] == lines
    assert "-> do not trust the machine; `ds-pretrain replay" in " ".join(" ".join(lines).split())
    answered = incident_lines(summary.incidents, [{"step": 3, "what": "it is the data", "certainty": "sure"}])
    assert "    -> replay of step 3: it is the data (sure)" in answered
    assert incident_lines(incidents_of(RunTable(write_run(tmp_path / "fine", rows_of([1]))), now=START + 1)) == []


def rank_rows(hosts: Sequence[str], steps: Sequence[int], slow: dict[int, float], start: int = 0,
              **phases: float) -> list[dict[str, Any]]:
    """Return the header of a start and rows in which ranks are slower in the backward pass by a factor."""
    rows: list[dict[str, Any]] = [{"start": start, "hosts": list(hosts), "coordinates": [{} for _ in hosts]}]
    for step in steps:
        backward = [60 * slow.get(rank, 1.0) for rank in range(len(hosts))]
        ms = {"data": [1.0] * len(hosts), "forward": [30.0] * len(hosts), "backward": backward,
              "optimizer": [9.0] * len(hosts), "reduce_wait": [0.0] * len(hosts),
              "own": [40 + value for value in backward]}
        rows.append({"step": step, "steps": 1, "ms": ms})
    return rows


def cells(data: dict[str, Any], key: str = "ratio") -> np.ndarray:
    """Return [rows, columns] of the map: ratios, or the codes of another key."""
    codes = np.frombuffer(base64.b64decode(data[key]), np.uint8).reshape(len(data["rows"]), len(data["columns"]))
    return np.where(codes == 0, np.nan, LOWEST * (HIGHEST / LOWEST) ** ((codes - 1) / 254)) if key == "ratio" else codes


def heat_map(folder: Path, rows: list[dict[str, Any]]) -> Any:
    folder.mkdir(exist_ok=True)
    append_rows(folder / "rank_times.jsonl", rows)
    times = RankTimes(folder)
    times.update()
    return times.data()


def test_a_row_of_the_heat_map_is_a_machine(tmp_path: Path) -> None:
    """Of three hosts, the second is missing in the next start, where its ranks' numbers belong to the third."""
    hosts = ["a", "a", "b", "b", "c", "c"]
    data = heat_map(tmp_path, [*rank_rows(hosts, range(1, 11), {2: 2.0}),
                               *rank_rows(["a", "a", "c", "c"], range(8, 13), {3: 3.0}, start=1)])
    assert [row[2] for row in data["rows"]] == hosts
    assert [column[:2] for column in data["columns"]] == [[step, step] for step in (*range(1, 11), *range(8, 13))]
    ratio = cells(data)
    assert ratio[2, :10] == pytest.approx(np.full(10, 1.6), rel=0.02)
    assert np.isnan(ratio[2:4, 10:]).all()
    assert ratio[5, 10:] == pytest.approx(np.full(5, 2.2), rel=0.02)
    assert data["layouts"][1] == [0, 1, -1, -1, 2, 3]
    assert data["phases"][cells(data, "phase")[2, 0]] == "backward"
    assert data["slowest"] == [[3, "c", 2.2, "backward"]]
    assert data["member"] is None


def test_a_rank_is_compared_with_those_of_its_pipeline_stage(tmp_path: Path) -> None:
    header, *rows = rank_rows(["a", "a", "b", "b"], [1], {2: 2.0, 3: 3.0})
    stages = [{"pipeline": stage, "data": rank} for stage in (0, 1) for rank in (0, 1)]
    assert cells(heat_map(tmp_path / "run", [header | {"coordinates": stages}, *rows]))[:, 0] == pytest.approx(
        [1, 1, 1, 220 / 160], rel=0.02)
    alone = [{"pipeline": stage} for stage in range(4)]
    assert cells(heat_map(tmp_path / "alone", [header | {"coordinates": alone}, *rows]))[:, 0] == pytest.approx(
        [1, 1, 1.6, 2.2], rel=0.02)


def test_a_thousand_ranks_and_many_rows_fit_a_page(tmp_path: Path) -> None:
    """The slow rank remains visible, with its number; the rows are read as they are appended."""
    hosts = [f"node-{rank // 8}" for rank in range(1000)]
    rows = rank_rows(hosts, range(0, 9000, 20), {333: 3.0})
    for row in rows[1:]:
        row["ms"] = {key: row["ms"][key] for key in ("own", "backward")}
    data = heat_map(tmp_path, rows)
    assert len(data["rows"]) <= ROWS
    assert COLUMNS // 4 < len(data["columns"]) <= COLUMNS
    assert len(json.dumps(data)) < 500_000
    row = next(number for number, (first, end, _) in enumerate(data["rows"]) if first <= 333 < end)
    assert data["rows"][row][2] == "node-41"
    assert data["rows"][row][0] + int(cells(data, "member")[row, 0]) == 333
    assert cells(data)[row] == pytest.approx(np.full(len(data["columns"]), 2.2), rel=0.02)
    assert np.nanmax(np.delete(cells(data), row, axis=0)) < 1.02
    assert data["slowest"][0][:2] == [333, "node-41"]
    many = heat_map(tmp_path / "hosts", rank_rows([f"h{rank}" for rank in range(700)], [1, 2], {}))
    assert len(many["rows"]) == ROWS


def test_a_file_without_several_ranks_or_with_damaged_rows_has_no_map(tmp_path: Path) -> None:
    assert heat_map(tmp_path / "none", []) is None
    assert heat_map(tmp_path / "one", rank_rows(["a"], [1, 2], {})) is None
    own = {"step": 1, "ms": {"own": [1, 2]}}
    damaged: list[Any] = [own, {"hosts": ["a", "b"], "coordinates": "x"}, own | {"ms": 1},
                          own | {"step": "x"}, {"hosts": []}, own | {"ms": {"own": [1, "x"]}},
                          own | {"ms": {"own": [None, None]}}, own | {"ms": {"own": [0, 0]}}, {"hosts": "x"}, own,
                          own | {"ms": {"own": [1]}}, own | {"ms": {"own": [[1], [2]]}},
                          own | {"ms": {"own": [1, 10**400]}},
                          own | {"step": 2, "ms": {"own": [1, None], "data": "x"}}]
    data = heat_map(tmp_path / "damaged", damaged)
    assert [column[:2] for column in data["columns"]] == [[1, 1], [2, 2]]
    assert [row[2] for row in data["rows"]] == ["a", "b"]


def test_the_page_of_a_healthy_run_stays_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of([1, 2, 3]), [event("start", 0), event("stop", 3, "finished")], [record()])
    append_rows(run / "rank_times.jsonl", rank_rows(["a"] * 4, range(1, 200), {}))
    text = page_html(page_data([RunTable(run)], watch=False))
    assert len(text) < 150_000
    assert "what went wrong" not in "\n".join(summary_lines(summarize(run)))
