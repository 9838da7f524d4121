"""Summary of a run folder, and its loss curve (`ds-pretrain summary --plot`)."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pretrain.analysis.summary import save_loss_plot, summarize, summary_lines
from pretrain.errors import ConfigError


def test_the_summary_of_a_killed_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        summarize(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps([{
        "flags": {"valid_data": str(tmp_path / "valid"), "train_data": "x"}, "train_steps": 9}]))
    (tmp_path / "valid.meta.json").write_text(json.dumps({"entropy_nats": 5.0}))
    rows = [{"step": 4, "loss": 4.5, "tokens_per_second": 10.0}, {"step": 4, "split": "valid", "eval_loss": 4.75}]
    # a killed run leaves an incomplete last line
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 5, "lo')
    summary = summarize(tmp_path)
    assert (summary.step, summary.train_steps, summary.valid_loss, summary.unigram_entropy) == (4, 9, 4.75, 5.0)
    assert summary.below_unigram_entropy
    (tmp_path / "run.json").write_text(json.dumps([{"flags": {"note": "a \x1b[2J try\nwith lr 2\u202e"}}]))
    assert summary_lines(summarize(tmp_path))[0] == r"note                  a \x1b[2J try with lr 2\u202e"


def test_the_last_finite_loss_is_shown_with_its_step(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps([{"flags": {}, "train_steps": 9}]))
    for losses, line in (([4.5, 4.25], "training loss         4.2500"),
                         ([4.5, None, None], "training loss         4.5000 at step 1; it is NaN or infinite in all "
                                             "later steps"),
                         ([None, None], "training loss         not known: it is NaN or infinite in all logged steps"),
                         ([], "training loss         not known")):
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert summary_lines(summarize(tmp_path))[:2] == [f"steps done            {len(losses)} of 9", line]


@pytest.mark.parametrize(("valid_loss", "below"), [(4.75, True), (5.0, False), (5.25, False), (None, False)])
def test_only_a_lower_loss_is_below_the_unigram_entropy(tmp_path: Path, valid_loss: float | None, below: bool) -> None:
    (tmp_path / "run.json").write_text(json.dumps([{"flags": {"valid_data": str(tmp_path / "valid")}}]))
    (tmp_path / "valid.meta.json").write_text(json.dumps({"entropy_nats": 5.0}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, "split": "valid", "eval_loss": valid_loss}))
    assert summarize(tmp_path).below_unigram_entropy == below


def test_named_validation_sets(tmp_path: Path) -> None:
    for name, entropy in (("web", 5.0), ("code", 4.0)):
        (tmp_path / f"{name}.meta.json").write_text(json.dumps({"entropy_nats": entropy}))
    blend = {"train_data": ["1", "x", "1", "y"]}
    (tmp_path / "run.json").write_text(json.dumps([{
        "flags": {**blend, "valid_data": [f"web={tmp_path}/web", f"{tmp_path}/code"]}, "train_steps": 9}]))
    rows = [{"step": 4, "split": split, "eval_loss": loss} for split, loss in
            (("valid/web", 4.0), ("valid/code", 5.0), ("valid", 4.5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = summarize(tmp_path)
    assert (summary.valid_loss, summary.unigram_entropy) == (4.5, 4.5)
    assert summary_lines(summary)[2:5] == ["validation loss       4.5000 nats per token (mean of 2 sets)",
                                           "  valid/web           4.0000", "  valid/code          5.0000"]
    (tmp_path / "run.json").write_text(json.dumps([{"flags": blend, "train_steps": 9}]))
    assert summarize(tmp_path).unigram_entropy is None, "that of a blend is not known"


def test_the_loss_plot(tmp_path: Path) -> None:
    """Each loss is drawn; the same metrics give the same SVG; a file that cannot be written is rejected."""
    (tmp_path / "run.json").write_text(json.dumps([{"flags": {}, "train_steps": 3}]))
    metrics, plot = tmp_path / "metrics.jsonl", tmp_path / "loss.svg"
    metrics.write_text("".join(f"{json.dumps({'step': step, 'loss': 9.0 - step})}\n" for step in (1, 2, 3)))

    def words() -> set[str | None]:
        save_loss_plot(tmp_path, plot)
        return {element.text for element in ElementTree.fromstring(plot.read_text()).iter()}

    assert {"training loss", "step", "nats per token"} <= words()
    assert "validation loss" not in words()
    for split, shown in (("valid", "validation loss"), ("valid/web", "validation loss (mean)")):
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 3, "split": split, "eval_loss": 6.5}) + "\n")
        assert shown in words()
    assert "valid/web" in words()
    before = plot.read_bytes()
    assert words()
    assert plot.read_bytes() == before
    for target, problem in (("loss.png", "ends with .svg"), ("missing/loss.svg", "cannot be written")):
        with pytest.raises(ConfigError, match=problem):
            save_loss_plot(tmp_path, tmp_path / target)
