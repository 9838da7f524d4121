"""Profiles of steps, planned and requested, timelines, and the output of DeepSpeed's profilers, on two real ranks."""

import gzip
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data.token_files.writer import IndexedWriter
from tests.support.cases import config
from tests.support.launch import ROOT, WORKERS, run_ranks
from tests.support.run_rows import rows

STEPS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("profiles") / "data"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document(np.random.default_rng(0).integers(1, 250, 4000))
        writer.finalize()
    return prefix


def train(folder: Path, data: Path, ds_config: dict[str, Any], program: list[str], **flags: Any) -> Path:
    """Run two ranks, and return the run folder."""
    (folder / "ds.json").write_text(json.dumps(ds_config))
    run = folder / "run"
    values = {"deepspeed_config": folder / "ds.json", "model": "tiny", "train_data": data, "split": "8,2,0",
              "model_overrides": "vocab_size=256,n_layer=2,n_embd=64", "seq_length": 16, "train_steps": STEPS,
              "save": run, "log_interval": 1, "eval_interval": 0, **flags}
    done = run_ranks([*program, *(f"--{name}={value}" for name, value in values.items())], 2, cwd=folder)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    return run


def steps_with_an_update(trace: Path) -> list[int]:
    """Return the steps in a trace during which an optimizer was called."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    updates = [event["ts"] for event in marks if event["name"].startswith("Optimizer.step#")]
    steps = [event for event in marks if re.fullmatch(r"step \d+", event["name"])]
    return [int(event["name"].split()[1]) for event in steps
            if any(event["ts"] <= time < event["ts"] + event["dur"] for time in updates)]


def test_planned_steps_and_the_profilers_of_deepspeed(tmp_path: Path, data: Path) -> None:
    ds_config = {**config(3, micro=2, accumulation=2), "comms_logger": {"enabled": True, "prof_all": True},
                 "flops_profiler": {"enabled": True, "profile_step": 2}, "wall_clock_breakdown": True}
    run = train(tmp_path, data, ds_config, [str(ROOT / "pretrain" / "train.py")], profile_steps="3:5")
    profile = run / "profiles" / "step3-5"
    assert sorted(path.name for path in profile.iterdir()) == [
        "rank0.trace.json.gz", "rank0.txt", "rank1.trace.json.gz", "rank1.txt"]
    for rank in (0, 1):
        assert steps_with_an_update(profile / f"rank{rank}.trace.json.gz") == [3, 4, 5]
        assert re.search(r"aten::(mm|addmm|linear|bmm)", (profile / f"rank{rank}.txt").read_text())
    events = [row for row in rows(run, "events.jsonl") if row["event"] == "profile"]
    assert [(row["first_step"], row["step"], row["path"]) for row in events] == [(3, 5, "profiles/step3-5")]
    assert "Profile Summary at step 3:" in (run / "profiles" / "flops.txt").read_text()  # DeepSpeed counts from 0
    communication = json.loads((run / "profiles" / "comms.json").read_text())
    assert any(row["count"] >= STEPS for sizes in communication.values() for row in sizes.values())
    assert re.search(r"fwd: [\d.]+ \| bwd: [\d.]+ .*step: [\d.]+", (tmp_path / "rank0.log").read_text())
    assert len((run / "profiles" / "comms.txt").read_text().splitlines()) > len(communication)


def test_a_running_job_is_profiled_on_request(tmp_path: Path, data: Path) -> None:
    """A file in the run folder asks for 2 steps, later a signal to the last rank asks for 3; rank 1 writes nothing."""
    ds_config = config(1, micro=2, accumulation=4, stages=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "PROFILE").write_text("2\n")
    (tmp_path / "faults.json").write_text(json.dumps({"signal_at": [int(signal.SIGUSR2), 11]}))
    program = [str(WORKERS / "faulty_train.py"), str(tmp_path / "faults.json")]
    # the ranks exchange their requests every 32 steps at most
    run = train(tmp_path, data, ds_config, program, profile_ranks="0", train_steps=160)
    assert not (run / "PROFILE").exists()
    events = [row for row in rows(run, "events.jsonl") if row["event"] == "profile"]
    assert [row["step"] - row["first_step"] + 1 for row in events] == [2, 3]
    assert events[1]["first_step"] > 10, "the signal came after step 10"
    for row in events:
        profile = run / row["path"]
        assert sorted(path.name for path in profile.iterdir()) == ["rank0.trace.json.gz", "rank0.txt"]
        assert steps_with_an_update(profile / "rank0.trace.json.gz") == list(range(row["first_step"], row["step"] + 1))


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, data: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profiles").write_text("a file in the place of the folder")
    run = train(tmp_path, data, config(2, micro=4, accumulation=1), [str(ROOT / "pretrain" / "train.py")],
                profile_steps="2")
    assert rows(run, "metrics.jsonl")[-1]["step"] == STEPS
    assert "the profile of rank 0 is not written (" in (tmp_path / "rank0.log").read_text()
    assert not [row for row in rows(run, "events.jsonl") if row["event"] == "profile"]

def test_the_timeline_of_a_pipeline(tmp_path: Path, data: Path) -> None:
    run = train(tmp_path, data, config(1, stages=2, micro=2, accumulation=4), [str(ROOT / "pretrain" / "train.py")],
                pipeline_timeline="2:3")
    output = (tmp_path / "rank0.log").read_text()
    folder = run / "profiles" / "timeline2-3"
    assert sorted(path.name for path in folder.iterdir()) == ["step2.svg", "step3.svg", "timeline.json", "timeline.txt"]
    assert re.search(r"pipeline timeline in \S+timeline2-3: step 3: .* ms; bubble [\d.]+% \(1F1B", output)
    steps = json.loads((folder / "timeline.json").read_text())["steps"]
    assert [(step["step"], step["micro_batches"], step["pipeline_stages"]) for step in steps] == [(2, 4, 2), (3, 4, 2)]
    for step in steps:
        assert step["bubble_of_1f1b"] == pytest.approx(1 / 5)
        assert 0 < step["bubble"] < 1
        for rank in step["ranks"]:
            times = {name: value for name, value in rank.items() if name.endswith("_ms")}
            assert min(times[name] for name in ("forward_ms", "backward_ms", "transfers_ms", "optimizer_ms")) > 0
            assert sum(times.values()) <= step["step_ms"] * 1.0001
