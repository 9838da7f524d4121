"""The files of a run folder can be written and read again. Durations are printed as hours, minutes and seconds."""

import json
import math
import resource
from pathlib import Path

from pretrain.monitor.read_run_folder import read_metrics, read_rows
from pretrain.monitor.training_row import format_duration
from pretrain.monitor.write_run_folder import RunFolder


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.9, 3723, 360_000)] == \
        ["0:00:00", "0:00:59", "1:02:03", "100:00:00"]


def test_rows_and_starts_are_appended_and_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, active=True)
    folder.metrics({"step": 1, "loss": 2.5})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    folder.metrics({"step": 2, "loss": math.nan})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')  # a killed run
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    assert read_rows(tmp_path / "metrics.jsonl", size) == [{"step": 2, "loss": None}]
    folder.metrics({"step": 4})  # begins a new line
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 4]
    for number in (1, 2):
        folder.start({"flags": {}, "time": number})
    assert [start["time"] for start in json.loads((tmp_path / "run.json").read_text())] == [1, 2]
    RunFolder(tmp_path / "other", active=False).metrics({"step": 1})
    assert not (tmp_path / "other").exists()


def test_rows_that_cannot_be_written_cause_one_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = RunFolder(tmp_path, active=True, warn=lines.append)
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "run.json").mkdir()
    folder.start({"flags": {}})
    for step in range(5):
        folder.metrics({"step": step})
    (tmp_path / "metrics.jsonl").rmdir()
    for step in range(5, 8):
        folder.metrics({"step": step})
    assert lines == [f"warning: {tmp_path}/run.json: this start is not recorded (Is a directory)",
                     f"warning: {tmp_path}/metrics.jsonl: rows are lost (Is a directory); the run continues",
                     f"{tmp_path}/metrics.jsonl is written again; 5 rows are missing"]
    assert [row["step"] for row in read_metrics(tmp_path)] == [5, 6, 7]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_full_disk_leaves_no_part_of_a_row(tmp_path: Path) -> None:
    """A limit of the file's size acts as a full disk: the system writes a part of the row."""
    lines: list[str] = []
    folder = RunFolder(tmp_path, active=True, warn=lines.append)
    folder.metrics({"step": 1})
    size, limits = (tmp_path / "metrics.jsonl").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        folder.metrics({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert len(lines) == 1
    folder.metrics({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_damaged_run_json_is_kept_under_another_name(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "run.json").write_text('[{"flags": {')
    RunFolder(tmp_path, active=True, warn=lines.append).start({"flags": {}, "time": 1})
    assert (tmp_path / "run.json.damaged").read_text() == '[{"flags": {'
    assert [start["time"] for start in json.loads((tmp_path / "run.json").read_text())] == [1]
    assert len(lines) == 1
