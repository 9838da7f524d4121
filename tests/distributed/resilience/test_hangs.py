"""Runs of two ranks in which one rank hangs: all ranks exit with 77, write their stacks, and name the rank.

All runs share one launch and run at the same time, because they mostly wait.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import config, flags
from tests.support.launch import run_forked
from tests.support.run_rows import rows

TIME_OUT_S = 6.0
HANGS = ("step_stopped", "save_stopped", "data_blocked", "alone")


@pytest.fixture(scope="module")
def runs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return name -> result of the run, and the folder of all runs."""
    folder = tmp_path_factory.mktemp("hangs")
    (folder / "zero2.json").write_text(json.dumps(config(2)))
    (folder / "pipeline.json").write_text(json.dumps(config(1, stages=2)))

    def run(name: str, json_file: str, **more: Any) -> dict[str, Any]:
        limits = {"step_timeout": TIME_OUT_S, "save_timeout": TIME_OUT_S, "first_step_timeout": 600}
        values = {**flags(corpus, steps=6), **limits, "deepspeed_config": folder / json_file, "save": folder / name,
                  "save_interval": 4, "eval_interval": 3, "eval_steps": 4, "log_interval": 1, **more.pop("flags", {})}
        return {"name": name, "run": str(folder / name), "flags": [f"--{key}={value}" for key, value in values.items()],
                **more}

    cases = [run("step_stopped", "zero2.json", hanging_rank=0, how="step_stopped"),
             run("save_stopped", "pipeline.json", hanging_rank=1, how="save_stopped"),
             run("data_blocked", "zero2.json", hanging_rank=1, how="data_blocked"),
             run("alone", "zero2.json", started_ranks=1, flags={"first_step_timeout": 3 * TIME_OUT_S}),
             run("raises", "pipeline.json", hanging_rank=1, how="raises"),
             run("slow", "zero2.json", hanging_rank=1, how=f"slow:{1.2 * TIME_OUT_S}",
                 flags={"save_timeout": 600})]
    return {"folder": folder, **run_forked([{"name": "all", "kind": "hung", "runs": cases}], folder)["all"]}


def event(runs: dict[str, Any], name: str) -> dict[str, Any]:
    last = rows(runs["folder"] / name, "events.jsonl")[-1]
    assert last["event"] == "hang"
    return last


@pytest.mark.parametrize("name", HANGS)
def test_all_ranks_exit_soon_after_the_time_out(runs: dict[str, Any], name: str) -> None:
    """A stopped rank is killed, after the other rank has exited with 77."""
    result = runs[name]
    print(f"{name}: exit codes {result['status']}, {result['seconds']} s after the hang; time-out {TIME_OUT_S} s")
    stopped = {"step_stopped": 0, "save_stopped": 1}.get(name)
    assert result["status"] == [-9 if rank == stopped else 77 for rank in range(len(result["status"]))]
    assert max(result["seconds"]) < 3 * TIME_OUT_S + 60  # TIME_OUT_S + 10 on an idle machine
    (line,) = [line for text in result["output"] for line in text.splitlines() if "hang: " in line]
    assert line.startswith("ds-pretrain: hang: no progress for ")
    assert event(runs, name)["reason"] in line
    assert not any("Traceback" in text for text in result["output"])


@pytest.mark.parametrize(("name", "rank", "words"), [
    ("step_stopped", 0, "is stopped (SIGSTOP) in phase step of step 3; 1 rank waits in phase step of step 3"),
    ("save_stopped", 1, "is stopped (SIGSTOP) in phase save of step 4; 1 rank waits in phase save of step 4"),
    ("data_blocked", 1, "is behind, in phase data of step 3; 1 rank waits in phase step of step 3"),
    ("alone", 1, "rank 1 has not connected: it has not started, has ended, or its host is lost"),
])
def test_the_rank_that_did_not_arrive_is_named(runs: dict[str, Any], name: str, rank: int, words: str) -> None:
    assert event(runs, name)["ranks"] == [rank]
    assert f"rank {rank} " in event(runs, name)["reason"]
    assert words in event(runs, name)["reason"]


def test_the_stacks_show_where_each_rank_was(runs: dict[str, Any]) -> None:
    def stacks(name: str, rank: int) -> str:
        return (runs["folder"] / name / "hangs" / "1" / f"rank_{rank}.txt").read_text()

    assert "in train_batch" in stacks("step_stopped", 1)
    assert "state: stopped" in stacks("step_stopped", 0)
    assert "in _save" in stacks("save_stopped", 0)
    assert "in _block" in stacks("data_blocked", 1)
    assert "in timed_data" in stacks("data_blocked", 1)
    assert "in init_process_group" in stacks("alone", 0)
    collectives = json.loads((runs["folder"] / "step_stopped/hangs/1/rank_1_collectives.json").read_text())
    assert collectives["entries"]


def test_the_end_of_each_ranks_flight_record_is_copied(runs: dict[str, Any]) -> None:
    folder = runs["folder"] / "step_stopped" / "hangs" / "1"
    assert (folder / "report.txt").read_text().splitlines()[1] == \
        "Last recorded step 2: ranks 0, 1. The last rows: rank_N_flight.jsonl."
    for rank in range(2):
        header, *rows = map(json.loads, (folder / f"rank_{rank}_flight.jsonl").read_text().splitlines())
        assert (header["rank"], [row["step"] for row in rows]) == (rank, [1, 2])


def test_the_other_ranks_end_soon_after_an_exception_and_only_the_first_cause_has_a_traceback(
        runs: dict[str, Any]) -> None:
    result = runs["raises"]
    print(f"raises: exit codes {result['status']}, {result['seconds']} s after the exception")
    assert result["status"] == [1, 1]
    assert "ValueError: the first cause" in result["output"][1]
    assert "Traceback" not in result["output"][0]
    assert "lost the connection to another rank (Connection" in result["output"][0]
    assert not (runs["folder"] / "raises" / "hangs").exists()


def test_slow_steps_evaluations_and_saves_are_no_hang(runs: dict[str, Any]) -> None:
    assert runs["slow"]["status"] == [0, 0], runs["slow"]["output"]
    assert not Path(runs["folder"] / "slow" / "hangs").exists()
