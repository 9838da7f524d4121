"""Runs of other programs continue here with the losses that they would have had, in their own layout and in others.

The programs are real: tests/distributed/workers/other_programs.py. `python -m tests.extensions.adopt.adopted` writes
the table of the page.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.export_hf import consolidate, export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.format.run_checkpoints import latest_problem, read_manifest
from pretrain.checkpoint.format.verify import damage_of
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.extensions.universal.write_universal import convert
from pretrain.monitor.read_run_folder import newest_start, read_rows
from tests.extensions.adopt.adopted import ALL, MODELS, QUICK, SAVED, TOLERANCES, Original, measure
from tests.support.conversion_faults import run_tool
from tests.support.launch import train_ranks


@dataclass(frozen=True)
class Measured:
    """Original programs, their folder, and the largest relative difference of their losses in each layout."""

    originals: Sequence[Original]
    folder: Path
    differences: dict[tuple[str, str], float]


@pytest.fixture(scope="module", params=[QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["", "all"])
def measured(corpus: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Measured:
    folder = tmp_path_factory.mktemp("adopted")
    return Measured(request.param, folder, measure(request.param, corpus, folder))


def test_losses_are_those_of_the_original(measured: Measured) -> None:
    assert len(measured.differences) >= 3 * len(QUICK)
    wrong = {key: value for each in measured.originals for key, value in measured.differences.items()
             if key[0] == each.name and not value <= TOLERANCES[each.precision]}
    assert wrong == {}


def test_the_command_its_run_and_all_tools(measured: Measured, corpus: str, tmp_path: Path) -> None:
    """Adopt with the command, continue from run.yaml in the same folder, then read both checkpoints with all tools."""
    original = measured.originals[0]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[original.model]))
    done = run_tool("import", measured.folder / "originals" / original.name, "--save", tmp_path / "run",
                    "--model", tmp_path / "config.json", "--step", str(SAVED))
    assert done.returncode == 0, done.stderr
    for text in ("optimizer states", "exp_avg, exp_avg_sq", "48 samples of a batch of 8", "decay_vectors True",
                 f"next: ds-pretrain check --world_size RANKS --config {tmp_path}/run/run.yaml"):
        assert text in done.stdout, done.stdout
    words = [f"--config={tmp_path}/run/run.yaml", f"--train_data={corpus}", "--split=80,20,0", "--seq_length=64",
             "--lr_schedule=constant", "--lr_warmup_steps=0", f"--train_steps={SAVED + 2}", "--log_interval=1",
             "--eval_steps=1"]
    ranks = train_ranks(2, words, tmp_path)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stdout
    assert "does not record its data: this run continues at sample 48 of --train_data" in ranks[0].stdout
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl") if "grad_norm" in row] == [SAVED + 1, SAVED + 2]
    assert newest_start(run)["resumed_from"] == str(checkpoints / f"global_step{SAVED}")
    adopted, later = (checkpoints / f"global_step{step}" for step in (SAVED, SAVED + 2))
    manifest = read_manifest(later)
    assert (manifest.adopted, manifest.data_fingerprint != "") == (None, True)  # the data is pinned from here on
    assert manifest.origin == read_manifest(adopted).origin
    wrong = train_ranks(2, [*words, "--split=70,30,0", "--train_steps=9"], tmp_path)
    assert wrong[0].returncode == 2
    assert "would train on tokens" in wrong[0].stdout

    assert damage_of(adopted, read_manifest(adopted)) == damage_of(later, manifest) == []
    assert latest_problem(checkpoints, later) is None
    assert diff(adopted, adopted) == []
    assert {difference.state for difference in diff(adopted, later)} >= {"fp32", "exp_avg", "exp_avg_sq"}
    done = run_tool("average", run, "--steps", f"{SAVED},{SAVED + 2}", "--output", tmp_path / "average")
    assert done.returncode == 0, done.stderr
    export_hf(plan_export(adopted, tmp_path / "exported"))
    consolidate(plan_export(adopted, tmp_path / "consolidated", with_tokenizer=False))
    for name in ("exported", "consolidated"):  # and back
        again = run_tool("import", tmp_path / name, "--output", tmp_path / f"{name}_again")
        assert again.returncode == 0, again.stderr
        found = diff(tmp_path / f"{name}_again/checkpoints/global_step0", adopted)
        assert {difference.name for difference in found} == {"optimizer"}  # imported weights have no states
    convert(adopted, tmp_path / "universal" / f"global_step{SAVED}")
    assert len(list((tmp_path / "universal" / f"global_step{SAVED}" / "zero").glob("*/exp_avg.pt"))) == \
        len(CheckpointReader(adopted).shapes)
    evaluated = run_tool("evaluate", adopted, "--data", corpus, "--max_samples", "4", "--seq_length", "64")
    assert evaluated.returncode == 0, evaluated.stderr
