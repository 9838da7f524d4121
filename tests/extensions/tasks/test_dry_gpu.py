"""Runs on GPUs that are not there: see tests/dry_gpu/test_runs.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.read_run_folder import read_rows
from tests.dry_gpu.conftest import DryGpu, dry_gpu  # noqa: F401 (a fixture)
from tests.dry_gpu.kinds import bf16, text_flags
from tests.dry_gpu.test_runs import train
from tests.extensions.tasks.test_run_evaluations import NAMES, write_tasks


@pytest.mark.slow
@pytest.mark.parametrize("values", [bf16(3), bf16(1, stages=2)], ids=["ZeRO-3", "pipeline"])
def test_a_run_answers_tasks_and_continues_texts(values: dict[str, Any], dry_gpu: DryGpu,  # noqa: F811
                                                 tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    own = {**text_flags(tmp_path), "eval_tasks": NAMES, "eval_tasks_folder": tmp_path / "tasks", "eval_tasks_limit": 3}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    train(dry_gpu, tmp_path / "run", tmp_path / "ds.json", own, devices=2)
    splits = {row.get("split") for row in read_rows(tmp_path / "run" / "metrics.jsonl")}
    assert {f"tasks/{name}" for name in NAMES.split(",")} <= splits
    assert read_rows(tmp_path / "run" / "predictions.jsonl")
