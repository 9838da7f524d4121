"""The command `export --format`: files, notes, repetition, and what cannot be exported."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.commands.export import main as export_main
from pretrain.errors import ConfigError
from pretrain.extensions.universal.extension import check_has_states
from pretrain.extensions.universal.write_universal import convert, export_trainer
from tests.checkpoint.test_export import load_exactly
from tests.support.checkpoints import STEPS, copy_checkpoints, real_run

Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(main: Callable[[], object], *words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["ds-pretrain", *map(str, words)])
        main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_run("pipeline2", corpus, tmp_path_factory)


def test_a_universal_export(run: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "universal" / f"global_step{STEPS}"
    text = command(export_main, run, "--format", "universal", "--output", out)
    assert 'tag="global_step3") loads it, with "checkpoint": {"load_universal": true}' in text
    assert (out.parent / "latest_universal").read_text() == out.name
    assert json.loads((out / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert (out / "zero/transformer.h.0.attn.c_attn.weight/exp_avg.pt").is_file()
    # a tensor for ZeRO-1 and 2, as torch's optimizers need it; none for ZeRO-3, where several groups would share it
    convert(run / "checkpoints/global_step3", tmp_path / "ours")
    for folder in (out, tmp_path / "ours"):
        assert all(torch.equal(torch.load(path), torch.tensor(float(STEPS))) for path in folder.glob("zero/*/step.pt"))
        state = torch.load(folder / "zero/optimizer_state.pt", weights_only=False)
        assert type(state["optimizer_state_dict"]["state"][0]["step"]) is int


def test_an_export_for_the_trainer(run: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / f"checkpoint-{STEPS}"
    text = command(export_main, run, "--format", "trainer", "--output", out)
    assert f'train(resume_from_checkpoint="{out}") resumes from it' in text
    assert {*os.listdir(out)} == {
        "model.safetensors", "config.json", "generation_config.json", "README.md", "source.json", "trainer_state.json",
        "scheduler.pt", "latest_universal", "global_step3"}
    state = json.loads((out / "trainer_state.json").read_text())
    assert (state["global_step"], state["train_batch_size"]) == (STEPS, 2)
    assert "TrainerControl" in state["stateful_callbacks"], "the Trainer cannot save without it"
    assert torch.load(out / "scheduler.pt")["last_epoch"] == STEPS
    load_exactly(out)
    written = (out / "source.json").stat().st_mtime_ns
    command(export_main, run, "--format", "trainer", "--output", out)
    assert (out / "source.json").stat().st_mtime_ns == written, "exported again"
    with pytest.raises(ConfigError, match=r"the folder exists and is not the output of this conversion"):
        command(export_main, run, "--output", out)


def test_states_that_the_format_cannot_hold_are_rejected(run: Path) -> None:
    folder = run / "checkpoints/global_step3"
    manifest = read_manifest(folder)
    check_has_states(folder, manifest)
    for changes, message in (({"weights_only": True}, "this checkpoint has only weights"),
                             ({"initialization": {"mup_base_width": 64}}, "it was trained with --mup_base_width"),
                             ({"optimizer": {"type": "Muon"}}, "it was trained with Muon, and the universal format"),
                             ({"optimizer": {"type": "Lamb"}}, "it was trained with Lamb")):
        with pytest.raises(ConfigError, match=message):
            check_has_states(folder, dataclasses.replace(manifest, **changes))


def test_a_checkpoint_with_nan_is_rejected(run: Path, tmp_path: Path, command: Command) -> None:
    folder = Path(shutil.copytree(run / "checkpoints/global_step3", tmp_path / "global_step3"))
    (folder / MANIFEST).write_text(dataclasses.replace(read_manifest(folder), finite=False).to_json())
    with pytest.raises(ConfigError, match=r"have NaN or infinite values. Use an earlier checkpoint"):
        command(export_main, folder, "--format", "universal", "--output", tmp_path / "out")


@pytest.mark.parametrize(("recorded", "expected"), [
    ({"log_interval": 5, "save_interval": 40, "eval_interval": 0}, (5, 10**9, 40)), (None, (10, 1000, 1000))])
def test_a_trainer_that_resumes_has_the_intervals_of_the_run(recorded: dict[str, Any] | None,
                                                             expected: tuple[int, int, int], run: Path,
                                                             tmp_path: Path) -> None:
    """TrainerState has 500 without them, and the Trainer prefers it to TrainingArguments: a note says so."""
    copy_checkpoints(run, tmp_path / "run/checkpoints")
    if recorded is not None:
        (tmp_path / "run/run.json").write_text(json.dumps([{"flags": recorded}]))
    notes = export_trainer(plan_export(tmp_path / "run/checkpoints/global_step3", tmp_path / "checkpoint-3"))
    state = TrainerState.load_from_json(str(tmp_path / "checkpoint-3/trainer_state.json"))
    assert (state.logging_steps, state.eval_steps, state.save_steps) == expected
    assert any(f"logging_steps {expected[0]}, eval_steps {expected[1]}, save_steps {expected[2]}: a Trainer" in note
               for note in notes)
