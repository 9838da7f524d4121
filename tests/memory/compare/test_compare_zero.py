"""The comparison of the core: memory alone, without predicted step times."""

import json
from pathlib import Path

import pytest

from pretrain.memory.compare import compare
from pretrain.memory.compare.combinations import Axes
from pretrain.memory.compare.compare import Workload
from pretrain.memory.compare.compare_zero import ComparisonReport, main, make_report
from pretrain.memory.footprint import GIB
from pretrain.memory.hardware import make_cluster
from pretrain.model.config import load_model_config
from tests.support.rejection import rejection

ARGUMENTS = ["--model", "gpt3-13b", "--world_size", "64", "--gpu", "a100-40"]


@pytest.fixture(autouse=True)
def _without_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No extension predicts step times."""
    monkeypatch.setattr(compare, "step_estimates", lambda cluster: None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def report_of(name: str, *, gpu: str, world_size: int) -> ComparisonReport:
    cluster = make_cluster(gpu=gpu, world_size=world_size, nodes=None, gpus_per_node=None)
    return make_report(Workload.of(load_model_config(name), cluster, name), Axes())


def test_the_table_has_all_layouts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run(capsys, *ARGUMENTS, "--write", str(tmp_path / "best.json"))
    report = report_of("gpt3-13b", gpu="a100-40", world_size=64)
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("zero", "pipeline"))}
    assert list(lines) == [row.candidate.name for row in report.rows]
    assert len(lines) > 30
    for row in report.rows:
        assert f"{row.estimate.device_bytes / GIB:,.1f}" in lines[row.candidate.name]
        assert ("too large" in lines[row.candidate.name]) == (not row.fits)
    assert "MFU" not in text
    best = report.recommended
    assert best is not None
    assert f"use    {best.candidate.name}, micro-batch " in text
    assert json.loads((tmp_path / "best.json").read_text()) == best.candidate.config


def test_the_simplest_layout_that_fits_is_recommended_with_its_largest_micro_batch() -> None:
    """gpt2 fits with ZeRO-1 on a device; 13 B parameters need a pipeline, or ZeRO-3."""
    small = report_of("gpt2", gpu="h100", world_size=8)
    large = report_of("gpt3-13b", gpu="a100-40", world_size=64)
    assert (small.rows[0].candidate.name, small.rows[0].candidate.layout.micro_batch_size) == ("zero1", 8)
    assert small.recommended is small.rows[0]
    assert large.recommended is large.rows[0]
    assert large.rows[0].candidate.name != "zero1"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--world_size", "8"], "--model"), (["--model", "gpt2"], "--world_size"),
    (["--model", "gpt2", "--world_size", "8", "--zero_stage", "4"], "--zero_stage"),
    (["--model", "gpt2", "--world_size", "8", "--calibrate", "runs/x"], "--calibrate"),
    (["--model", "gpt2", "--world_size", "8", "--gpu", "0.01", "--write", "x.json"], "no layout that fits")])
def test_wrong_flags_are_rejected_in_one_line(arguments: list[str], message: str) -> None:
    assert message in rejection(main, arguments)


@pytest.mark.parametrize(("gpu", "code"), [("4090", 3), ("RTX 5090", 3), ("h100", 0), ("gb300", 0)])
def test_the_exit_code_says_whether_a_layout_fits(gpu: str, code: int) -> None:
    assert main(["--model", "gpt3-13b", "--world_size", "2", "--gpu", gpu]) == code
