"""A run that early stopping ends, on 2 real ranks: interrupted, with lost metrics, started again, and continued."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from tests.support.cases import config, flags
from tests.support.launch import train_ranks
from tests.support.run_rows import rows


def train(folder: Path, corpus: str, *, stage: int = 1, patience: int = 2,
          **others: Any) -> list[subprocess.CompletedProcess[str]]:
    """Train with two named validation sets. No loss decreases by 100: only the first evaluation is an improvement."""
    (folder / "ds.json").write_text(json.dumps(config(stage, micro=2)))
    words = flags(corpus, layers=1, hidden=32, steps=20, eval_interval=2, save="run", micro_batch_size=2,
                  early_stopping_patience=patience, early_stopping_min_delta=100, **others) | {"split": "90,0,10"}
    done = train_ranks(2, ["--deepspeed_config=ds.json", *(f"--{key}={value}" for key, value in words.items()),
                           "--valid_data", f"first={corpus}", "second=copy"], folder)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout + done[1].stdout
    return done


@pytest.fixture(scope="module")
def outputs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[Any]]:
    """Return the folder, the output of four starts, and the steps of the evaluations that remained in the rows."""
    folder = tmp_path_factory.mktemp("early")
    for file in Path(corpus).parent.glob(f"{Path(corpus).name}.*"):
        shutil.copy(file, folder / f"copy{file.name.removeprefix(Path(corpus).name)}")
    first = train(folder, corpus, exit_step=4)
    (folder / "run" / "metrics.jsonl").unlink()
    second = train(folder, corpus, stage=3)
    evaluations = [row["step"] for row in rows(folder / "run", "metrics.jsonl") if row.get("split") == "valid"]
    third = train(folder, corpus, stage=3)
    fourth = train(folder, corpus, patience=3)
    return folder, [start[0].stdout for start in (first, second, third, fourth)], evaluations


def test_evaluations_that_a_kill_has_prevented_are_made_by_the_next_start(outputs: Any, corpus: str) -> None:
    """A run killed after its last save lacks the rows that are deleted here. Recorded evaluations are not repeated."""
    folder = outputs[0].parent / "killed"
    shutil.copytree(outputs[0], folder)
    metrics = folder / "run" / "metrics.jsonl"
    for patience, step, lost, remade in ((3, 8, ("test", "valid"), 4), (50, 20, ("test",), 1)):
        if patience == 50:
            train(folder, corpus, patience=50)
        before = rows(folder / "run", "metrics.jsonl")
        kept = [row for row in before if row["step"] != step or row.get("split", "").partition("/")[0] not in lost]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
        output = train(folder, corpus, patience=patience)[0].stdout
        assert f"step {step:>7}  test loss" in output
        found = rows(folder / "run", "metrics.jsonl")
        assert len(found) == len(before) == len(kept) + remade
        assert losses_at(step, found) == losses_at(step, before)
    assert "run is complete: 20 of 20 steps are done" in train(folder, corpus, patience=50)[0].stdout
    assert rows(folder / "run", "metrics.jsonl") == found


def losses_at(step: int, found: list[dict[str, Any]]) -> dict[str, float]:
    return {row["split"]: row["eval_loss"] for row in found if row["step"] == step and "split" in row}


def test_the_state_survives_a_resume_in_another_layout_with_lost_metrics(outputs: Any) -> None:
    folder, (_, second, _, _), evaluations = outputs
    assert evaluations == [6]  # steps 2 and 4 were evaluated before
    assert "run ended early at step 6 of 20: the validation loss has not decreased by at least 100 in 2 " in second
    assert "saved global_step6 in run" in second
    (event, _) = [row for row in rows(folder / "run", "events.jsonl") if row["event"] == "early_stop"]
    assert (event["step"], event["best_step"]) == (6, 2)
    manifest = read_manifest(folder / "run" / "checkpoints" / "global_step6")
    assert manifest.recipe_states["early_stopping"]["evaluations"] == 2
    assert any(row.get("split") == "test" and row["step"] == 6 for row in rows(folder / "run", "metrics.jsonl"))


def test_the_same_command_reports_the_end_and_how_to_continue(outputs: Any) -> None:
    folder, (_, _, third, fourth), _ = outputs
    assert "run ended early at step 6 of 20" in third
    assert "give --early_stopping_patience above 2, or 0 for no early stopping" in third
    assert "loss" not in third.replace("validation loss", ""), "the run trained"
    assert "run ended early at step 8 of 20" in fourth
    ends = [(row["step"], row["reason"]) for row in rows(folder / "run", "events.jsonl") if row["event"] == "stop"]
    assert ends == [(4, "--exit_step"), *[(6, "early_stop")] * 2, (8, "early_stop")]  # the supervisor reads them
