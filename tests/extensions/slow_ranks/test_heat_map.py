"""The heat map of ranks by time, in the page of a run."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.extensions.slow_ranks.heat_map import COLUMNS, HIGHEST, LOWEST, ROWS, HeatMap
from tests.support.run_folders import append_rows, rank_rows


def cells(data: dict[str, Any], key: str = "ratio") -> np.ndarray:
    """Return [rows, columns] of the map: ratios, or the codes of another key."""
    codes = np.frombuffer(base64.b64decode(data[key]), np.uint8).reshape(len(data["rows"]), len(data["columns"]))
    return np.where(codes == 0, np.nan, LOWEST * (HIGHEST / LOWEST) ** ((codes - 1) / 254)) if key == "ratio" else codes


def heat_map(folder: Path, rows: list[dict[str, Any]]) -> Any:
    folder.mkdir(exist_ok=True)
    append_rows(folder / "rank_times.jsonl", rows)
    times = HeatMap(folder)
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
