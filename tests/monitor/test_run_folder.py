"""The files of a run folder can be written and read again. Durations are printed as hours, minutes and seconds."""

import json
import math
from pathlib import Path

from pretrain.monitor.meter import format_duration
from pretrain.monitor.read_run_folder import read_metrics, read_rows
from pretrain.monitor.write_run_folder import RunFolder


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.9, 3723, 360_000)] == \
        ["0:00:00", "0:00:59", "1:02:03", "100:00:00"]


def test_rows_are_appended_and_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, active=True)
    folder.metrics({"step": 1, "loss": 2.5})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    folder.metrics({"step": 2, "loss": math.nan})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')  # a killed run
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    assert read_rows(tmp_path / "metrics.jsonl", size) == [{"step": 2, "loss": None}]


def test_only_an_active_run_folder_writes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunFolder(path, active=False).metrics({"step": 1})
    assert not path.exists()


def test_starts_are_appended_to_run_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, active=True)
    for number in (1, 2):
        folder.start({"flags": {}, "time": number})
    assert [start["time"] for start in json.loads((tmp_path / "run.json").read_text())] == [1, 2]
