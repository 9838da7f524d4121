"""Notes about a run with --expected_curve."""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.curve import Expected
from pretrain.stored_json import read_json
from tests.config.test_validate import plan_of
from tests.wrong_inputs.world import make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with data, a tokenizer, and ladders."""
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def test_notes_on_an_expected_curve(world: Path) -> None:
    """The curve of a run of 50 steps of 64 tokens with one sample: what differs from it is noted."""
    def notes(**flags: Any) -> list[str]:
        plan = plan_of(world, {}, extensions={"expected_curve": str(world / "ladder-right.json")}, **flags)
        assert plan.inputs["ladder"]["target"].at(3200) == Expected(4.0, 3.9, 4.1)
        return [note.removeprefix("--expected_curve: ") for note in plan.notes if "--expected_curve" in note]

    assert notes() == []
    assert notes(valid_data=str(world / "few")) == []  # the ladder names the training data only
    assert [note.split(",")[0] for note in notes(train_steps=100)] == [
        "the curve ends at 3", "the ladder predicts a run of 3"]
    assert notes(residual_dropout=0.1) == [
        "with dropout, the training loss is higher than the validation loss that a ladder predicts"]
    assert notes(mup_base_width=64, model_overrides="tie_word_embeddings=false")[0].startswith(
        "the learning rates of the ladder are scaled as standard, and those of this run are muP")
    values = read_json(world / "ladder-right.json")
    values["target"]["peak_lr"] = 1e-2
    (world / "ladder-rate.json").write_text(json.dumps(values))
    plan = plan_of(world, {}, extensions={"expected_curve": str(world / "ladder-rate.json")})
    assert "the peak learning rate is 0.001, and 0.01 in the run that the ladder predicts" in " ".join(plan.notes)
