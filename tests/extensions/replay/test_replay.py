"""Replays on real engines: planted faults get the right result, and steps are repeated bit by bit in each layout."""

from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.read_run_folder import read_events
from tests.extensions.replay import WORKERS
from tests.extensions.replay.planted_cases import planted_cases
from tests.extensions.replay.planted_replays import run_planted
from tests.support.cases import case, config, flags
from tests.support.launch import run_worker

FEW = ("weight_low", "operator_late")


def test_faults_of_a_weight_and_of_an_operator_are_named_with_rank_and_layer(tmp_path: Path) -> None:
    planted = [each for each in planted_cases("zero1", trained=2) if each.name in FEW]
    answers = run_planted("zero1", tmp_path, planted, trained=2)
    weight, operator = (answers[name] for name in FEW)
    assert (weight["grade"], operator["grade"]) == ("right", "right"), answers
    assert (weight["kind"], weight["step"], weight["ranks"], weight["layer"]) == ("memory_weights", 4, [2], "2")
    assert (operator["kind"], operator["step"], operator["ranks"], operator["layer"]) == ("forward", 5, [1], "2")
    assert operator["operator"] == "2.mlp.down"
    assert operator["hosts"] != []
    assert "2 replays agree with each other" in operator["evidence"][-1]


@pytest.mark.slow
def test_one_fault_of_each_kind_is_answered_right(tmp_path: Path) -> None:
    """`python -m tests.extensions.replay.planted_replays FOLDER` plants all 100 faults, in four layouts."""
    by_kind = {each.group: each for each in planted_cases("zero1")}
    answers = run_planted("zero1", tmp_path, [*by_kind.values()])
    assert {answer["grade"] for answer in answers.values()} == {"right"}, answers


def steps_of(corpus: str, **others: Any) -> dict[str, Any]:
    return flags(corpus, layers=2, steps=8, eval_interval=0, log_interval=1, flight_interval=1, save_interval=2,
                 **others)


@pytest.mark.slow
def test_a_step_is_repeated_after_a_rollback_inside_a_ramp_and_of_a_branch(corpus: str, tmp_path: Path) -> None:
    values = config(1, micro=2, accumulation=2)
    runs = [
        case("ramp", "train", values, steps_of(corpus, batch_schedule="0:4,1024:8")),
        case("rollback", "train", values, steps_of(corpus, max_bad_steps=1),
             plant={"kind": "nan", "step": 5, "consumed_samples": 32}),
        case("branch", "train", values, steps_of(corpus, resume_from="run-ramp@4", batch_schedule="0:4,1024:8")),
    ]
    asked: dict[str, dict[str, Any]] = {
        "ramp": {"step": 6}, "rollback": {"step": 6}, "branch": {"step": 5},
        "before": {"run": "run-rollback", "step": 5, "before_rollback": 1, "plant": runs[1]["plant"]}}
    cases = [*runs, *({"name": f"{name}_verdict", "job": "replay", "run": f"run-{name}", **examine}
                      for name, examine in asked.items())]
    results = run_worker(str(WORKERS / "replay_worker.py"), cases, 2, tmp_path)
    assert any(row["event"] == "rollback" for row in read_events(tmp_path / "run-rollback"))
    for name in asked:
        result = results[f"{name}_verdict"]
        assert (result["kind"], result["certainty"]) == ("reproducible", "sure"), (name, result)
