"""Runs of train.py with bad data or a useless learning rate: rollbacks, exit code 76, and restarts after a rollback."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.analysis.summary import save_loss_plot, summarize
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints, newest_good, read_manifest
from pretrain.checkpoint.format.shard_index import FP32
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.monitor.read_run_folder import newest_path, read_metrics
from tests.support.cases import config, flags
from tests.support.launch import WORKERS, run_ranks
from tests.support.run_rows import events

BATCH, STEPS, INTERVAL = 8, 20, 4


def train(folder: Path, corpus: str, values: dict[str, Any], factors: dict[int, str] | None = None,
          rank: int | None = None, kill_in: str | None = None, **others: Any) -> list[Any]:
    """Train on two ranks; `factors` multiplies the loss of the batches that begin with these samples.

    The first call of the function `kill_in` kills the rank.
    """
    folder.mkdir(exist_ok=True)
    (folder / "ds.json").write_text(json.dumps(values))
    (folder / "faults.json").write_text(json.dumps({"factors": factors or {}, "rank": rank, "kill_in": kill_in}))
    words = {**flags(corpus, layers=2, steps=STEPS), "deepspeed_config": "ds.json", "save": "run", "log_interval": 1,
             "save_interval": INTERVAL, **others}
    return run_ranks([str(WORKERS / "faulty_train.py"), "faults.json", *(f"--{key}={value}" for key, value in
                                                                     words.items())], 2, cwd=folder)


def is_finite(run: Path) -> bool:
    """Return whether the newest good checkpoint has finite weights, all read from its files."""
    found = newest_good(run / "checkpoints")
    assert found is not None
    reader = CheckpointReader(found[0])
    for name, shape in reader.shapes.items():
        weight = torch.empty(shape.numel() if isinstance(shape, torch.Size) else int(torch.Size(shape).numel()))
        reader.copy(name, FP32, 0, weight)
        if not weight.isfinite().all():
            return False
    return True


DATA2 = {"micro": 2, "accumulation": 2}
ROLLBACKS = {  # name -> DeepSpeed JSON, bad samples, rank with the bad samples, flags, step of the checkpoint
    "nan": (config(1, precision="bf16", **DATA2), dict.fromkeys(range(10 * BATCH, 15 * BATCH, BATCH), "nan"), 1,
            {"async_save": True, "checkpoint_mirror": "mirror"}, 8),
    "spike": (config(3, **DATA2), {14 * BATCH: "100"}, None, {"spike_policy": "rollback", "spike_window": 16}, 12),
}


@pytest.fixture(scope="module", params=ROLLBACKS)
def rolled_back(request: pytest.FixtureRequest, corpus: str,
                tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Train with five NaN in a row on one rank, or with a spike. The run must return to a checkpoint and finish."""
    values, factors, rank, others, _ = ROLLBACKS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    done = train(folder, corpus, values, factors, rank, **others)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout[-3000:]
    assert "rollback 1 of at most 3" in done[0].stdout
    return request.param, folder


def test_the_run_returns_to_the_checkpoint_and_skips_the_samples(rolled_back: tuple[str, Path]) -> None:
    name, run = rolled_back[0], rolled_back[1] / "run"
    saved_step = ROLLBACKS[name][4]
    (rollback,) = events(run, "rollback")
    assert rollback["to_step"] == saved_step
    assert rollback["skipped_samples"] == [saved_step * BATCH, 15 * BATCH]
    path = newest_path([row for row in read_metrics(run) if "loss" in row])
    assert [row["step"] for row in path] == list(range(1, STEPS + 1))
    assert [row["consumed_samples"] for row in path] == [
        step * BATCH for step in range(1, saved_step + 1)] + [
        (step + 15 - saved_step) * BATCH for step in range(saved_step + 1, STEPS + 1)]
    assert all(row["loss"] < 6 for row in path)
    bad = events(run, "skip" if name == "nan" else "spike")
    assert bad[-1]["samples"] == [14 * BATCH, 15 * BATCH]
    assert len(bad) == (5 if name == "nan" else 2)
    newest = newest_good(run / "checkpoints")
    assert newest is not None
    assert newest[1].consumed_samples == (STEPS + 15 - saved_step) * BATCH
    assert summarize(run).step == STEPS
    save_loss_plot(run, run / "loss.svg")


def test_later_checkpoints_are_no_candidates(rolled_back: tuple[str, Path]) -> None:
    checkpoints = rolled_back[1] / "run" / "checkpoints"
    assert [manifest.step for _, manifest in complete_checkpoints(checkpoints)[0]] == [20, 16, 12, 8, 4]
    abandoned = [path.name for path in checkpoints.glob("abandoned-1/*")]
    assert abandoned == (["global_step12"] if rolled_back[0] == "nan" else [])
    mirror = rolled_back[1] / "mirror"
    if mirror.exists():
        assert {path: read_manifest(path).save_id for path in mirror.iterdir()} == {
            mirror / path.name: read_manifest(path).save_id for path in checkpoints.glob("global_step*")}


@pytest.mark.parametrize("rolled_back", ["nan", pytest.param("spike", marks=pytest.mark.slow)], indirect=True)
def test_a_restart_before_the_next_save_skips_the_same_samples(rolled_back: tuple[str, Path], corpus: str,
                                                               tmp_path: Path) -> None:
    name, folder = rolled_back
    values, factors, rank, others, saved_step = ROLLBACKS[name]
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    for checkpoint in (run / "checkpoints").glob("global_step*"):
        if int(checkpoint.name.removeprefix("global_step")) > saved_step:
            shutil.rmtree(checkpoint)
    for abandoned in (run / "checkpoints").glob("abandoned-1/*"):  # as if the run had been killed before it moved this
        abandoned.rename(run / "checkpoints" / abandoned.name)
    (run / "metrics.jsonl").unlink()
    done = train(tmp_path, corpus, values, factors, rank, **others)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout[-3000:]
    assert len(events(run, "rollback")) == 1, "no further rollback"
    keys = ("step", "consumed_samples", "loss", "grad_norm", "lr")
    again, first = ([[row[key] for key in keys] for row in read_metrics(path) if "loss" in row]
                    for path in (run, folder / "run"))
    assert again == first[-len(again):]
    assert len(again) == STEPS - saved_step


def test_a_save_between_bad_steps_keeps_the_older_checkpoints(corpus: str, tmp_path: Path) -> None:
    """With --keep_checkpoints 2, checkpoint 12 is saved between bad steps. The second rollback needs checkpoint 4."""
    factors = dict.fromkeys(range(10 * BATCH, 16 * BATCH, BATCH), "nan")
    done = train(tmp_path, corpus, config(0, **DATA2), factors, 1, max_bad_steps=3, keep_checkpoints=2)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout[-3000:]
    run = tmp_path / "run"
    assert [(row["step"], row["to_step"]) for row in events(run, "rollback")] == [(13, 8), (11, 4)]
    assert [manifest.step for _, manifest in complete_checkpoints(run / "checkpoints")[0]] == [20, 16]


def test_the_first_step_after_a_resume_is_compared_with_those_before(corpus: str, tmp_path: Path) -> None:
    """In another layout. Without the checkpoint's values, a run would have to wait for half of a new window."""
    bad = {12 * BATCH: "2.2"}
    done = [*train(tmp_path, corpus, config(1, **DATA2), bad, spike_window=16, exit_step=12),
            *train(tmp_path, corpus, config(3, precision="bf16", **DATA2), bad, spike_window=16, exit_step=14)]
    assert [process.returncode for process in done] == [0] * 4, done[-1].stdout[-3000:]
    run = tmp_path / "run"
    (spike,) = [event for event in events(run, "spike") if event["name"] == "loss"]
    assert (spike["step"], spike["samples"]) == (13, [12 * BATCH, 13 * BATCH])
    before = [row["loss"] for row in read_metrics(run) if "loss" in row and row["step"] <= 12]
    assert 0.95 * min(before) < spike["mean"] < max(before)
    saved = read_manifest(run / "checkpoints" / "global_step12").recipe_states["spikes"]
    assert saved["loss"] == pytest.approx(before, rel=1e-5)
    assert len(saved["grad_norm"]) == 12


@pytest.mark.slow
@pytest.mark.parametrize("function", ["pretrain.checkpoint.save.retention:write_latest",
                                      "pretrain.checkpoint.save.retention:move_abandoned",
                                      "pretrain.resilience.rollback:load_checkpoint",
                                      "pretrain.resilience.rollback:_report",
                                      "pretrain.resilience.rollback:record_rollback"])
def test_a_run_that_is_killed_in_a_rollback(function: str, rolled_back: tuple[str, Path], corpus: str,
                                            tmp_path: Path) -> None:
    """After the record, the restarted run equals the undisturbed one. Before it, the run only has to finish."""
    name, folder = rolled_back
    values, factors, rank, others, _ = ROLLBACKS[name]
    done = train(tmp_path, corpus, values, factors, rank, function, **others)
    assert done[0].returncode != 0
    done = train(tmp_path, corpus, values, factors, rank, **others)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout[-3000:]
    if not function.endswith("record_rollback"):
        keys = ("step", "consumed_samples", "loss", "grad_norm", "lr")
        again, first = ([[row[key] for key in keys] for row in newest_path(
            [row for row in read_metrics(run) if "loss" in row])] for run in (tmp_path / "run", folder / "run"))
        assert again == first
    newest = newest_good(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest[1].step == STEPS


DIVERGING = {  # name -> DeepSpeed JSON and flags
    "pipeline2_bf16": (config(1, precision="bf16", stages=2, micro=2, accumulation=4, lr=1e4),
                       {"keep_checkpoints": 2, "keep_best": 1, "eval_interval": INTERVAL}),
    "zero3_bf16": (config(3, precision="bf16", lr=1e4, **DATA2), {"keep_checkpoints": 2, "max_rollbacks": 1}),
    "fp32_zero0_keep_best": (config(0, lr=1e4, **DATA2),
                             {"keep_checkpoints": 2, "keep_best": 1, "eval_interval": INTERVAL}),
}


@pytest.mark.parametrize("name", ["pipeline2_bf16", "zero3_bf16",
                                  pytest.param("fp32_zero0_keep_best", marks=pytest.mark.slow)])
def test_a_diverging_run_ends_with_76_and_keeps_a_finite_checkpoint(name: str, corpus: str, tmp_path: Path) -> None:
    values, others = DIVERGING[name]
    done = train(tmp_path, corpus, values, None, None, train_steps=400, **others)
    run = tmp_path / "run"
    assert [process.returncode for process in done] == [76, 76], done[0].stdout[-3000:]
    assert "Traceback" not in "".join(process.stdout for process in done)
    lines = [line for line in done[0].stdout.splitlines() if line.startswith("ds-pretrain: error: ")]
    assert len(lines) == 1
    number = others.get("max_rollbacks", 3)
    assert f"The run has had {number} of at most {number} rollbacks (--max_rollbacks; see run/roll" in lines[0]
    (stop,) = events(run, "stop")
    assert stop["exit_code"] == 76
    assert lines[0].endswith(stop["reason"])
    assert len(events(run, "rollback")) == number
    assert is_finite(run)
    print(f"\n{name}: 76 after {stop['step']} steps and {number} rollbacks; "
          f"checkpoints {[manifest.step for _, manifest in complete_checkpoints(run / 'checkpoints')[0]]}")


def test_overflows_at_the_minimum_of_the_loss_scale_end_with_76(corpus: str, tmp_path: Path) -> None:
    values = config(2, precision="fp16", **DATA2)
    values["fp16"] |= {"initial_scale_power": 2, "min_loss_scale": 1, "hysteresis": 1}
    factors = dict.fromkeys(range(6 * BATCH, 50 * BATCH, BATCH), "1e30")
    done = train(tmp_path, corpus, values, factors, emulate_fp16=True, max_bad_steps=3)
    assert [process.returncode for process in done] == [76, 76], done[0].stdout[-3000:]
    assert "Traceback" not in done[0].stdout
    (line,) = [line for line in done[0].stdout.splitlines() if line.startswith("ds-pretrain: error: ")]
    assert "the gradients of fp16 overflowed in 3 steps in a row" in line
    assert "loss scale of 1 cannot be lowered further. Train with bf16, or use " in line
    assert is_finite(tmp_path / "run")


def test_without_a_checkpoint_the_run_ends_with_76(corpus: str, tmp_path: Path) -> None:
    factors = dict.fromkeys(range(0, STEPS * BATCH, BATCH), "inf")
    done = train(tmp_path, corpus, config(1, **DATA2), factors, 0, max_bad_steps=3)
    assert [process.returncode for process in done] == [76, 76], done[0].stdout[-3000:]
    assert "ds-pretrain: error: step 3: 3 bad steps in a row (the last one: the loss is " in done[0].stdout
    assert "There is no good checkpoint to return to. Correct the initial weights or the data, " in done[0].stdout
    assert "save more often" not in done[0].stdout
