"""A real run with --expected_curve: on the curve of an equal run, and off it with a hundredth of its learning rate."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.analysis.run_table import RunTable
from pretrain.analysis.summary import expected_of_run, summarize, summary_lines
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.extensions.ladder.expected_curve import CurvePoint, Target, counted_parameters
from pretrain.extensions.ladder.ladder_file import DECAYED, Ladder, Law, Point, Range, write_ladder
from pretrain.model.config import model_config_from
from pretrain.monitor.read_run_folder import read_metrics, read_rows
from pretrain.stored_json import read_json
from tests.support.cases import config
from tests.support.launch import train_ranks
from tests.support.model_shapes import SHAPES

STEPS, SEQ_LENGTH, BATCH = 60, 64, 4
MODEL = {**SHAPES["llama"], "vocab_size": 256}


def write_curve(path: Path, corpus: str, curve: list[CurvePoint], **changes: Any) -> None:
    """Write a ladder.json by hand, whose curve is known."""
    tokens_per_step, end = SEQ_LENGTH * BATCH, curve[-1]
    target = Target(counted_parameters(model_config_from(MODEL, "model.json")), end.tokens, tokens_per_step, end.loss,
                    end.low, end.high, curve, peak_lr=3e-3)
    source = IndexedDataset(Path(corpus))
    points = [Point("small", 1e3, 1e4, 5.0)]
    write_ladder(path, dataclasses.replace(
        Ladder({"train": source.fingerprint}, 256, "llama", "standard", points,
               {DECAYED: Law(2.0, 1.0, 1.0, 0.3, 0.3)}, Range.of(points), target), **changes))


def train(folder: Path, corpus: str, name: str, ladder: Path, *, lr: float, **more: Any) -> str:
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / f"{name}.json").write_text(json.dumps({**config(1, lr=lr), "train_micro_batch_size_per_gpu": BATCH,
                                                     "gradient_accumulation_steps": 1}))
    flags = {"deepspeed_config": f"{name}.json", "model": "model.json", "seq_length": SEQ_LENGTH, "save": name,
             "train_data": corpus, "split": "80,20,0", "train_steps": STEPS, "eval_steps": 1, "log_interval": 1,
             "expected_curve": ladder, "max_bad_steps": 99, **more}
    (done,) = train_ranks(1, [f"--{key}={value}" for key, value in flags.items()], folder)
    assert done.returncode in (0, 75), done.stdout
    return done.stdout


def changes_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run / "events.jsonl") if row["event"] in ("off_curve", "on_curve")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Path:
    """Train a run within a wide band; and one with a hundredth of the rate, off its curve, in two starts."""
    folder = tmp_path_factory.mktemp("expected")
    ends = [CurvePoint(SEQ_LENGTH * BATCH * step, 4.0, 0.5, 9.0) for step in (3, STEPS)]
    write_curve(folder / "wide.json", corpus, ends)
    train(folder, corpus, "healthy", folder / "wide.json", lr=3e-3)
    rows = [row for row in read_metrics(folder / "healthy") if "loss" in row]
    tokens, losses = (np.array([row[key] for row in rows][2:]) for key in ("consumed_tokens", "loss"))
    smoothed = np.polynomial.Polynomial.fit(np.log(tokens), losses, 4)
    write_curve(folder / "narrow.json", corpus, [
        CurvePoint(float(at), loss, 0.98 * loss, 1.02 * loss) for at in np.geomspace(tokens[0], tokens[-1], 30)
        for loss in (float(smoothed(math.log(at))),)])
    for exit_step in (STEPS - 10, STEPS):
        output = train(folder, corpus, "faulty", folder / "narrow.json", lr=3e-5, exit_step=exit_step)
        (folder / f"output-{exit_step}").write_text(output)
    return folder


def test_a_run_on_its_curve(folder: Path) -> None:
    assert changes_of(folder / "healthy") == []
    (line,) = (line for line in summary_lines(summarize(folder / "healthy")) if line.startswith("expected loss"))
    assert "4.0000 (0.5000 to 9.0000) at 15,360 tokens, training loss " in line


def test_a_run_off_its_curve(folder: Path) -> None:
    """One event in two starts, and the same line on the terminal."""
    (event,) = changes_of(folder / "faulty")
    assert (event["event"], event["side"]) == ("off_curve", "above")
    assert event["step"] < STEPS - 10
    assert event["low"] <= event["expected"] <= event["high"] < event["loss"]
    assert "learning rate: its peak is 3e-05, and 0.003 in the run that the ladder predicts" in event["causes"]
    assert not any(cause.startswith("data:") for cause in event["causes"])  # nothing was sudden
    output = (folder / f"output-{STEPS - 10}").read_text()
    assert f"off_curve: {event['reason']}; likely causes, in the order of the sanity checks: " in output
    assert "--expected_curve: the peak learning rate is 3e-05, and 0.003 in the run that the ladder predicts" in output
    assert "off_curve" not in (folder / f"output-{STEPS}").read_text()
    assert any(line.startswith("expected loss") and line.endswith(f"; off the curve since about step {event['since']}")
               for line in summary_lines(summarize(folder / "faulty")))
    record = read_json(folder / "faulty" / "run.json")[-1]["expected_curve"]
    assert record["curve"] == [list(each.values()) for each in read_json(folder / "narrow.json")["target"]["curve"]]


def test_the_band_at_the_steps_of_the_run(folder: Path) -> None:
    table = RunTable(folder / "faulty")
    expected = expected_of_run(table)
    assert expected.values["step"].tolist() == table.training.column("step")[2:].tolist()
    assert np.all(expected.low["loss"] < expected.values["loss"])
    assert np.all(expected.values["loss"] < expected.high["loss"])
