"""Rows of a run as columns and as points: abandoned rows, reduced curves, appended and replaced files."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from pretrain.analysis.run_table import Columns, kept_evaluations, kept_rows
from pretrain.errors import ConfigError
from pretrain.extensions.report.compare import run_names
from pretrain.extensions.report.main import page_html
from pretrain.extensions.report.page_data import MAX_POINTS, ShownRun, page_data, points_per_run, reduce_rows, run_data
from pretrain.monitor.read_run_folder import newest_path
from tests.support.run_folders import event, record, rows_of, write_run


def test_kept_rows_are_the_newest_path() -> None:
    generator = random.Random(0)
    for _ in range(300):
        rows = [{"step": generator.randint(1, 12), "line": line, "number": line}
                for line in range(generator.randint(0, 15))]
        columns = Columns()
        columns.append(rows)
        kept = [row for row, is_kept in zip(rows, kept_rows(columns), strict=True) if is_kept]
        assert kept == newest_path(rows)


def test_evaluations_of_steps_that_were_trained_again_are_abandoned() -> None:
    training, evaluations = Columns(), Columns()
    training.append([{"step": step, "line": line} for line, step in ((0, 1), (1, 2), (3, 3), (5, 3), (7, 4))])
    evaluations.append([{"step": step, "line": line} for line, step in ((2, 2), (4, 3), (6, 3))])
    assert kept_evaluations(evaluations, training).tolist() == [True, False, True]


def test_reduced_points_have_the_range_and_the_mean_of_their_rows() -> None:
    values = np.random.default_rng(0).normal(size=100_003)
    values[[5, 70_000]] = [50.0, -70.0]
    values[10:90:3] = math.nan
    values[200:30_000] = math.nan
    curves = reduce_rows({"step": np.arange(100_003.0), "value": values, "same": np.ones(100_003)}, 6000)
    assert len(curves.values["step"]) <= 1500
    starts = curves.low["step"].astype(int) if "step" in curves.low else np.array([])
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], 100_003], strict=True)):
        rows = values[start:end]
        rows = rows[np.isfinite(rows)]
        if len(rows) == 0:
            assert np.isnan(curves.values["value"][number])
            continue
        assert curves.low["value"][number] == rows.min()
        assert curves.high["value"][number] == rows.max()
        assert curves.values["value"][number] == pytest.approx(rows.mean())
    assert (curves.high["value"][np.isfinite(curves.high["value"])].max(), np.nanmin(curves.low["value"])) == (50, -70)
    assert "same" not in curves.low
    assert starts[5] < 20, "the start of the run has small buckets"


def test_a_large_run_gives_a_small_page(tmp_path: Path) -> None:
    num_rows = 30_000
    text = "".join(json.dumps({**row, "step": step}) + "\n" for step, row in
                   enumerate(rows_of([7], eval_interval=100) * num_rows, 1))
    run = write_run(tmp_path / "run", [], [event("save", step) for step in range(num_rows)])
    (run / "metrics.jsonl").write_text(text)
    data = page_data([ShownRun(run)], watch=False)
    assert len(data["runs"][0]["training"]["values"]["loss"]) <= MAX_POINTS / 4
    assert data["runs"][0]["event_counts"] == {"save": num_rows}
    assert len(page_html(data)) < 4e6
    assert points_per_run(32) * 32 < 3 * MAX_POINTS


def test_rows_that_are_appended_are_read_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of([1, 2]))
    table = ShownRun(run)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss"')
        file.flush()
        table.update()
        assert (table.training.num_rows, table.num_lines) == (2, 2)
        file.write(': 1.5}\n[1]\nnot JSON\n\n{"loss": 1}\n{"step": -1, "loss": 1}\n{"step": 1e400, "loss": 1}\n')
    table.update()
    assert table.training.column("loss").tolist()[2:] == [1.5]
    assert table.generation == 0
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    table.update()
    assert (table.generation, table.training.num_rows) == (1, 1)
    assert run_data(table, 100)["overview"]["not_finite"] == 1


def test_names_of_runs() -> None:
    assert run_names([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert run_names([Path("/a/x"), Path("/b/x"), Path("/b/y")]) == ["a/x", "b/x", "b/y"]
    assert len(set(run_names([Path("/a/x"), Path("/a/x")]))) == 2


def test_a_folder_that_is_no_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is not a run folder"):
        ShownRun(tmp_path)


def test_changes_between_starts_are_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [], [record(), record(seed=5, hosts=["b"])])
    starts = run_data(ShownRun(run), 100)["starts"]
    changes = [["flags", "seed", "1234", "5"], ["hosts", "", '["vm"]', '["b"]']]
    assert [start["changes"] for start in starts] == [[], changes]
