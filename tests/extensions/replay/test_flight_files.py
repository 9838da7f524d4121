"""Files of the flight recorder, which of them are kept, the choice of the interval, and the comparison of rows."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from pretrain.extensions.replay.compare import differing_keys
from pretrain.extensions.replay.layer_digests import LARGEST_COST, interval_for
from pretrain.extensions.replay.record_files import (
    Header,
    RecordFile,
    kept_folder,
    prune_starts,
    read_start,
    start_folder,
)

HEADER = Header(rank=0, world_size=1, host="h", pid=1, first_step=0, layers=["1"], interval=0)


def test_the_files_of_a_rank_hold_at_least_the_last_rows(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, HEADER, steps=3)
    for step in range(1, 3):
        file.append({"step": step})
    file.change_header(interval=50, measured_ms={"step": 10.0})
    for step in range(3, 12):
        file.append({"step": step, "loss": math.nan})
    file.copy_to(kept_folder(tmp_path, 11, "request"))
    record = read_start(tmp_path)[0]
    assert [*record.rows] == [7, 8, 9, 10, 11]
    assert (record.header.interval, record.header.measured_ms) == (50, {"step": 10.0})
    assert differing_keys(record.rows[11], read_start(kept_folder(tmp_path, 11, "request"))[0].rows[11]) == []
    file.close()
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_a_row_that_was_trained_again_replaces_the_first_one_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, HEADER, steps=10)
    for row in ({"step": 1, "lr": 1.0}, {"step": 1, "lr": 2.0}):
        file.append(row)
    with open(file.path, "a", encoding="utf-8") as half:
        half.write('{"step": 2, "lr"')
    assert read_start(tmp_path)[0].rows == {1: {"step": 1, "lr": 2.0}}


def test_headers_of_other_versions_are_read(tmp_path: Path) -> None:
    for rank, more in enumerate(({"host": "h", "layers": ["1"], "new": {"a": 1}, "pid": 3}, {})):
        (tmp_path / f"rank_{rank}.jsonl").write_text(f'{json.dumps({"rank": rank, **more})}\n{{"step": 1}}\n')
    (tmp_path / "rank_2.jsonl").write_text('{"step": 1}\n')
    found = read_start(tmp_path)
    assert {rank: record.header for rank, record in found.items()} == {
        0: Header(rank=0, host="h", layers=["1"], pid=3), 1: Header(rank=1)}
    assert found[0].rows == {1: {"step": 1}}


def test_a_full_disk_leaves_no_part_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = RecordFile(tmp_path, HEADER, steps=10), os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
        with pytest.raises(OSError, match="No space left"):
            file.append({"step": 1})
    file.append({"step": 2})
    assert [*read_start(tmp_path)[0].rows] == [2]
    assert all(json.loads(line) for line in file.path.read_text().splitlines())


def test_old_starts_are_removed_except_those_that_ended_unexpectedly(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for number in range(12):
        start_folder(tmp_path, number).mkdir(parents=True)
        events.append({"event": "start", "step": 0})
        if number not in (0, 1, 3, 4, 6):  # crashes
            events.append({"event": "stop", "step": 0})
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    kept_folder(tmp_path, 5, "spike").mkdir(parents=True)
    prune_starts(tmp_path, 11)
    left = sorted(int(path.name[6:]) for path in (tmp_path / "flight").glob("start_*"))
    assert left == [3, 4, 6, 9, 10, 11]
    assert kept_folder(tmp_path, 5, "spike").is_dir()


@pytest.mark.parametrize(("cost", "cheap", "step", "expected"), [
    (100, 0.1, 835, 100), (0.1, 0.01, 1000, 1), (14, 0.2, 1000, 10), (5, 0.1, 20, 500)])
def test_the_interval_keeps_the_cost_of_all_keys_below_the_limit(cost: float, cheap: float, step: float,
                                                                expected: int) -> None:
    """In the last case the keys of each step alone cost more."""
    interval = interval_for(cost, cheap, step)
    assert interval == expected
    assert cost / interval + cheap <= LARGEST_COST * step or cheap > LARGEST_COST * step


def test_rows_are_compared_in_the_order_of_the_stages_and_nan_equals_nan() -> None:
    row = {"step": 1, "time": 1.0, "tokens": 5, "loss": math.nan, "layers_forward": [1, 2], "states": {"master": 3}}
    other = {**row, "time": 2.0, "layers_forward": [1, 4], "states": {"master": 4}, "weights_after": [1]}
    assert differing_keys(row, {**row, "time": 3.0}) == []
    assert differing_keys(row, other) == ["states", "layers_forward"]
