"""Loss curve of tools/summarize.py --plot: the same metrics give the same SVG, and errors are one line."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pretrain.analysis.summary import save_loss_plot
from pretrain.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run folder with three logged steps and one evaluation."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps([{"flags": {}, "train_steps": 3}]))
    rows = [*({"step": step, "loss": 9.0 - step} for step in (1, 2, 3)),
            {"step": 3, "split": "valid", "eval_loss": 6.5}, {"step": 3, "split": "test", "eval_loss": 6.6}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_the_same_metrics_give_the_same_svg(run: Path) -> None:
    first, second = run / "first.svg", run / "second.svg"
    save_loss_plot(run, first)
    save_loss_plot(run, second)
    assert first.read_bytes() == second.read_bytes()
    words = {text for element in ElementTree.fromstring(first.read_text()).iter() if (text := element.text)}
    assert {"training loss", "validation loss", "step", "nats per token"} <= words


def test_each_loss_is_drawn(run: Path) -> None:
    save_loss_plot(run, run / "both.svg")
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(rows[:3]))
    save_loss_plot(run, run / "training.svg")
    assert "validation loss" in (run / "both.svg").read_text()
    assert "validation loss" not in (run / "training.svg").read_text()


@pytest.mark.parametrize(("target", "words"), [
    ("loss.png", "ends with .svg"),
    ("missing/loss.svg", "cannot be written"),
])
def test_a_file_that_cannot_be_written_is_rejected(run: Path, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        save_loss_plot(run, run / target)


def test_each_named_validation_set_is_drawn(run: Path) -> None:
    rows = [{"step": 3, "split": "valid/web", "eval_loss": 6.0}, {"step": 3, "split": "valid/code", "eval_loss": 7.0}]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    save_loss_plot(run, run / "named.svg")
    words = {element.text for element in ElementTree.fromstring((run / "named.svg").read_text()).iter()}
    assert {"validation loss (mean)", "valid/web", "valid/code"} <= words
