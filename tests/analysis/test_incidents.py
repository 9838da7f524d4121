"""The list of what went wrong in a run, and its lines in a terminal."""

from pathlib import Path

from pretrain.analysis.incidents import incident_lines, incidents_of
from pretrain.analysis.run_table import RunTable
from pretrain.analysis.summary import summarize, summary_lines
from pretrain.resilience.lease_file import Owner
from pretrain.resilience.run_lock import LOCK
from tests.support.lock_race import write_lease
from tests.support.run_folders import START, append_rows, event, rows_of, write_run

END = START + 101 * 0.4  # just after the rows


def kinds(run: Path, now: float = END) -> list[tuple[str, bool, int]]:
    """Return (kind, is it wrong now, number) of the list."""
    return [(one.kind, one.is_open, one.count) for one in incidents_of(RunTable(run), now=now)]


def test_what_is_wrong_now_stands_before_what_is_over(tmp_path: Path) -> None:
    spikes = [event("spike", step, f"a spike of the loss: {step}", name="loss") for step in range(10, 47)]
    run = write_run(tmp_path / "run", rows_of(list(range(1, 101))), [
        event("start", 0), *spikes, event("save_failed", 50, "No space left"), event("save", 60),
        event("save_failed", 85, "No space left"), event("rollback", 95, "changed")])
    assert kinds(run) == [("save_failed", True, 1), ("rollback", False, 1), ("save_failed", False, 1),
                          ("spike", False, 37)]
    *_, saved, spike = incidents_of(RunTable(run), now=END)
    assert spike.headline == "37 times, most recently: a spike of the loss: 46"
    assert (spike.steps_text, saved.advice) == ("steps 10 to 46", "")
    append_rows(run / "events.jsonl", [event("save", 99), event("stop", 100, "finished")])
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
                                   for kind in ("corruption", "hang", "rollback", "skip", "spike", "save_failed",
                                                "verify", "guard", "rejected"))]
    run = write_run(tmp_path / "run", rows_of([1, 2, 3]), [*events, event("stop", 3, "x", exit_code=76)])
    summary = summarize(run)
    lines = incident_lines(summary.incidents)
    assert lines[0] == "what went wrong (! = still wrong)"
    assert sum(line.startswith("! ") for line in lines) == 6
    assert lines[-1].startswith("  and 2 more")
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    assert summary_lines(summary)[-len(lines):] == lines
    assert "-> do not trust the machine" in " ".join(" ".join(lines).split())
    assert "    -> step 3: it is the data" in incident_lines(summary.incidents, [(3, "step 3: it is the data")])
    assert incident_lines(incidents_of(RunTable(write_run(tmp_path / "fine", rows_of([1]))), now=START + 1)) == []
