"""Blends with a schedule and named validation sets give the same losses in every layout, also after a resume."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.analysis.evaluate.data import DataFlags, open_data
from pretrain.analysis.model_source import evaluation_source
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import newest_start, read_metrics
from tests.support.cases import case, config
from tests.support.launch import run_worker, train_ranks
from tests.support.layouts import dp2, pp2, relative_difference

TOLERANCE = 1e-6  # relative, fp32
SAVED, STEPS = 3, 8
LAYOUTS = {"zero1": dp2(1), "zero3": dp2(3), "pipeline": pp2(1)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with three sources and two validation sets, each of other tokens."""
    folder = tmp_path_factory.mktemp("blend")
    for number, name in enumerate(("web", "code", "books", "valid_web", "valid_code")):
        random = np.random.default_rng(number)
        with IndexedWriter(folder / name, np.uint16) as writer:
            for length in random.integers(1, 200, 30):
                writer.add_document(random.integers(40 * number, 40 * number + 90, length))
            writer.finalize({"vocab_size": 256, "max_token": 249, "eod_token": 0})
    return folder


def flags(data: Path) -> dict[str, Any]:
    """Return the flags. The weights change inside the third step, and when the sixth begins; a step has 8 samples."""
    return {"model": "tiny", "model_overrides": "vocab_size=256,n_layer=2,n_embd=64",
            "train_data": ["0.6", f"{data}/web", "0.3", f"{data}/code", "0.1", f"{data}/books"],
            "valid_data": [f"web={data}/valid_web", f"code={data}/valid_code"],
            "blend_schedule": [f"{20 * 32}:1,1,1", f"{40 * 32}:0,0.5,0.5"], "seq_length": 32, "train_steps": STEPS,
            "eval_steps": 1}


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [case(name, "run", values, flags(data), first=0, saved=SAVED) for name, values in LAYOUTS.items()]
    for before, after in (("zero1", "zero3"), ("zero3", "pipeline"), ("pipeline", "zero1")):
        cases.append(case(f"{before}-{after}", "run", LAYOUTS[after], flags(data), first=SAVED,
                          source=f"run-{before}/checkpoints/global_step{SAVED}"))
    return run_worker("blend_worker.py", cases, 2, tmp_path_factory.mktemp("layouts"))


def test_losses_and_samples_are_equal_in_every_layout_and_after_a_resume(results: dict[str, Any],
                                                                         subtests: pytest.Subtests) -> None:
    expected = results["zero1"]
    assert len(expected["loss"]) == STEPS
    assert list(expected["valid"]) == ["valid/web", "valid/code"]
    assert abs(expected["valid"]["valid/web"] - expected["valid"]["valid/code"]) > 1e-3
    for name, found in results.items():
        with subtests.test(name):
            first = SAVED if "-" in name else 0
            assert found["samples"] == expected["samples"][first:]
            assert relative_difference(found["loss"], expected["loss"][first:]) <= TOLERANCE
            assert relative_difference(list(found["valid"].values()), list(expected["valid"].values())) <= TOLERANCE


def test_each_validation_set_is_logged_by_name(data: Path, tmp_path: Path) -> None:
    values = {**config(1, precision="bf16", micro=2), "csv_monitor": {"enabled": True, "output_path": "csv",
                                                                      "job_name": "run"}}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    words = [word for key, value in flags(data).items()
             for word in (f"--{key}", *(value if isinstance(value, list) else [str(value)]))]
    done = train_ranks(2, ["--deepspeed_config", "ds.json", *words, "--train_steps", "4", "--eval_interval", "2",
                           "--save_interval", "2", "--keep_checkpoints", "2", "--keep_best", "1", "--save", "run",
                           "--log_interval", "1"], tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    rows = [row for row in read_metrics(tmp_path / "run") if "split" in row]
    assert [(row["step"], row["split"]) for row in rows] == [
        (step, name) for step in (2, 4) for name in ("valid/web", "valid/code", "valid")]
    for web, code, mean in (rows[:3], rows[3:]):
        assert mean["eval_loss"] == pytest.approx((web["eval_loss"] + code["eval_loss"]) / 2)
        assert mean["mean_of_sets"] == 2
    manifest = read_manifest(tmp_path / "run" / "checkpoints" / "global_step4")
    assert manifest.eval_loss == rows[-1]["eval_loss"]
    assert manifest.data is not None
    assert [Path(source["prefix"]).name for source in manifest.data["sources"]] == ["web", "code", "books"]
    start = newest_start(tmp_path / "run")
    assert list(start["data"]) == ["train", "valid/web", "valid/code"]
    assert start["flags"]["train_data"][:2] == ["0.6", f"{data}/web"]
    assert "valid/code loss" in done[0].stdout
    assert "valid loss" in done[0].stdout
    source = evaluation_source(tmp_path / "run", None)
    again = open_data(source, DataFlags(), ConfigError("--tokenizer"))
    assert [(one.name, len(one)) for one in again] == [("valid/web, as in training", 8),
                                                       ("valid/code, as in training", 8)]
    parts = open_data(source, DataFlags(split=("train", "valid")), ConfigError("--tokenizer"))
    assert [one.name.replace(f"{data}/", "") for one in parts] == [
        "train of web", "train of code", "train of books", "valid/web", "valid/code"]
    [written] = (tmp_path / "csv").rglob("*valid_code_loss.csv")
    assert len(list(csv.reader(written.open()))) == 3, "a header and two evaluations"
