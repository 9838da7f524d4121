"""The comparison of the core: memory alone, without predicted step times."""

import json
from pathlib import Path

import pytest

from pretrain.commands.new.layout import best_layout
from pretrain.config.layout import Layout
from pretrain.memory.compare import compare, compare_zero
from pretrain.memory.compare.changes_that_fit import changes_that_fit
from pretrain.memory.compare.compare_flags import cluster_of, parse_flags
from pretrain.memory.compare.compare_zero import candidates_of, main, make_report, workload_of
from pretrain.memory.compare.table import ComparisonReport
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


def report_of(*arguments: str) -> ComparisonReport:
    flags = parse_flags(list(arguments))
    workload = workload_of(flags, cluster_of(flags, flags.gpu))
    return make_report(flags, workload, candidates_of(flags, workload, "cuda"))


def test_the_table_has_all_layouts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, report = run(capsys, *ARGUMENTS, "--write", str(tmp_path / "best.json")), report_of(*ARGUMENTS)
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
    small, large = report_of("--model", "gpt2", "--world_size", "8", "--gpu", "h100"), report_of(*ARGUMENTS)
    assert (small.rows[0].candidate.name, small.rows[0].candidate.layout.micro_batch_size) == ("zero1", 8)
    assert small.recommended is small.rows[0]
    assert large.recommended is large.rows[0]
    assert large.rows[0].candidate.name != "zero1"
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
