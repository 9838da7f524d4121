"""The comparison of the core: memory alone, without predicted step times."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.commands.new.layout import best_layout
from pretrain.config.layout import Layout
from pretrain.memory.compare import compare, compare_zero
from pretrain.memory.compare.changes_that_fit import changes_that_fit
from pretrain.memory.compare.compare_zero import main
from pretrain.memory.footprint import GIB
from pretrain.memory.hardware import make_cluster
from pretrain.model.config import load_model_config
from tests.support.rejection import rejection

ARGUMENTS = ["--model", "gpt3-13b", "--world_size", "64", "--gpu", "a100-40"]


@pytest.fixture(autouse=True)
def _without_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No extension predicts step times."""
    for module in (compare, compare_zero):
        monkeypatch.setattr(module, "step_estimates", lambda cluster: None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def test_the_sizes_of_the_zero_paper_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO (arXiv 1910.02054), figure 1: 7.5e9 parameters on 64 GPUs."""
    assert "120 / 31.4 / 16.6 / 1.9 GB" in run(capsys, "--num_parameters", "7.5e9", "--world_size", "64")


def test_table_json_and_csv_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, *ARGUMENTS, "--json", str(tmp_path / "all.json"), "--csv", str(tmp_path / "all.csv"))
    found: dict[str, Any] = json.loads((tmp_path / "all.json").read_text())
    flat = {row["name"]: row for row in csv.DictReader(io.StringIO((tmp_path / "all.csv").read_text()))}
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("zero", "pipeline"))}
    assert list(lines) == list(flat) == [row["name"] for row in found["rows"]]
    assert len(lines) > 30
    for row in found["rows"]:
        assert f"{row['device_bytes'] / GIB:,.1f}" in lines[row["name"]]
        assert flat[row["name"]]["fits"] == str(row["fits"])
        assert ("too large" in lines[row["name"]]) == (not row["fits"])
    assert "MFU" not in text
    assert f"use    {found['recommended']}, micro-batch " in text


def test_the_simplest_layout_that_fits_is_recommended_with_its_largest_micro_batch(
        capsys: pytest.CaptureFixture[str]) -> None:
    """gpt2 fits with ZeRO-1 on a device; 13 B parameters need a pipeline, or ZeRO-3."""
    small = json.loads(run(capsys, "--model", "gpt2", "--world_size", "8", "--gpu", "h100", "--json"))
    assert (small["recommended"], small["rows"][0]["layout"]["micro_batch_size"]) == ("zero1", 8)
    large = json.loads(run(capsys, *ARGUMENTS, "--json"))
    assert large["recommended"] == large["rows"][0]["name"] != "zero1"
    assert large["rows"][0]["fits"]
    model, cluster = load_model_config("gpt2"), make_cluster(gpu="h100", world_size=8, nodes=None, gpus_per_node=8)
    row = best_layout(model, cluster, seq_length=1024, batch_tokens=2**19)
    assert (row.candidate.name, row.step) == ("zero1", {})


def test_changes_that_fit_begin_with_the_fewest() -> None:
    title, *changes = changes_that_fit(Layout(micro_batch_size=8), load_model_config("gpt2"), ranks_per_node=1,
                                       budget_bytes=4 * GIB)
    assert title == "changes that are predicted to fit, the fewest first:"
    assert 1 <= len(changes) <= 3
    assert "," not in changes[0].partition(": ")[0].replace("accumulation steps", "")


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "--model / --num_parameters"), (["--model", "gpt2", "--num_parameters", "1e9"], "both"),
    (["--model", "gpt2", "--world_size", "8", "--calibrate", "runs/x"], "--calibrate"),
    (["--model", "gpt2", "--world_size", "8", "--gpu", "0.01", "--write", "x.json"], "no layout that fits"),
    (["--num_parameters", "7e9", "--world_size", "8", "--micro_batch_size", "2"], "--micro_batch_size")])
def test_wrong_flags_are_rejected_in_one_line(arguments: list[str], message: str) -> None:
    assert message in rejection(main, arguments)
