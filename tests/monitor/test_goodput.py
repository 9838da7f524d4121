"""Goodput over resumes, rollbacks and damaged files."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.read_run_folder import Goodput


def write(run: Path, rows: list[dict[str, Any]], started: float) -> None:
    events = [{"event": "save", "step": 0, "time": 1.0}, {"event": "start", "step": 0, "time": started},
              {"event": "start", "step": 15, "time": started + 50}]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "step_ti')


def row(step: int, seconds: float) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "step_time_ms": 1e3 * seconds}


def test_steps_that_were_trained_again_count_once(tmp_path: Path) -> None:
    """Three starts: up to step 30, from step 15 up to step 20, and again from step 15."""
    rows = [row(1, 5.0), row(10, 1.0), {"step": 10, "split": "valid", "eval_loss": 2.0}, row(20, 2.0), row(30, 3.0),
            row(20, 4.0), {"step": 25, "loss": 1.0}, {"step": None, "step_time_ms": "x"}]
    write(tmp_path, rows, started=1000.0)
    goodput = Goodput.read(tmp_path, 15)
    kept_s = 5.0 + 9 * 1.0 + 5 * 4.0  # the newest row of the steps 11 to 20 has 4 s
    assert goodput.fraction(1100.0) == pytest.approx(kept_s / 100)
    goodput.add(20, 0.5)
    assert goodput.fraction(1100.0) == pytest.approx((kept_s + 2.5) / 100)


def test_a_rollback_drops_steps_and_a_new_run_or_branch_begins_at_zero(tmp_path: Path) -> None:
    for first_step in (0, 100):
        assert Goodput.read(tmp_path, first_step).fraction(time.time() + 10) == 0
    goodput = Goodput(first_start=0.0)
    for step in (1, 10, 20, 30):
        goodput.add(step, 1.0)
    assert goodput.fraction(60.0) == pytest.approx(0.5)
    goodput.return_to(25)
    assert goodput.fraction(100.0) == pytest.approx(0.25)
    goodput.return_to(0)
    assert goodput.fraction(100.0) == 0
    assert goodput.fraction(-1.0) is None  # a clock that went back
