"""Notes about settings and data that may surprise."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.commands.check import main as check
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.device import Device
from tests.config.test_validate import CUDA, plan_of, words, world
from tests.support.wrapped_models import WRAPPED_MODELS, needs_wrapped

__all__ = ["world"]  # the fixture


def test_notes_on_rates_that_hardly_fit_the_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of 50 steps, with the schedule of the flags and with a scheduler of the JSON."""
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}
    check(words(world, {"scheduler": scheduler}, {}))
    out = capsys.readouterr().out
    assert "step 1: 0, step 2: 0, step 9: 0.0002857, step 25: 0, step 50: 0" in out
    assert "the JSON's scheduler: the learning rate reaches its lowest value, 0, at step 11, and 39 of the 50" in out
    assert "the learning rate" not in " ".join(plan_of(world, {"scheduler": {
        **scheduler, "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}}).notes)
    assert any(note.startswith("--lr_schedule cosine: the learning rate reaches its lowest value, 0.0001, at step 20, "
                               "and 30 of the 50") for note in plan_of(world, {}, lr_decay_steps=20).notes)


@pytest.mark.parametrize(("vocab_size", "fits"), [(300, True), (512, True), (8192, False)])
def test_a_vocabulary_far_larger_than_the_tokenizer_gets_a_note(world: Path, vocab_size: int, fits: bool) -> None:
    """A vocabulary of 512 for a tokenizer with 300 tokens is usual padding."""
    plan = plan_of(world, {}, tokenizer=str(world / "tokenizer.json"), train_data=str(world / "few"),
                   model_overrides=f"vocab_size={vocab_size}")
    notes = [note for note in plan.notes if "tokenizer" in note]
    assert len(notes) == (0 if fits else 1)
    assert fits or "--model_overrides vocab_size=320" in notes[0]


def test_a_long_document_outside_the_training_part_gets_a_note(world: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "long_last", np.uint16) as writer:
        for length in [100] * 99 + [8000]:
            writer.add_document(np.resize(np.arange(1, 97), length))
        writer.finalize()
    data = {"train_data": str(tmp_path / "long_last")}
    for flags, fraction in (({}, "54%"), ({"valid_data": str(world / "few"), "split": "9,0,1"}, "50%"),
                            ({"split": "50,50,0"}, "28%"), ({"split": "1,0,0"}, None),
                            ({"train_data": str(world / "corpus")}, None)):
        notes = [note for note in plan_of(world, {}, **{**data, **flags}).notes if note.startswith("--split")]
        assert [fraction in note for note in notes] == ([] if fraction is None else [True]), (flags, notes)


def test_notes_name_settings_without_an_effect(world: Path) -> None:
    plan = plan_of(world, {"zero_optimization.overlap_comm": True}, split="1,0,0")
    assert [note.split(":")[0] for note in plan.notes] == [
        "zero_optimization.overlap_comm", "the data's tokenizer has 512 tokens and the model's vocabulary 8,192, of "
        "which 7,680 are never used", "no validation data", "no batch size is given"]
    assert plan.ds_config["zero_optimization"]["overlap_comm"] is False


@needs_wrapped
def test_notes_name_a_padding_token_that_ends_documents(world: Path, tmp_path: Path) -> None:
    found = {}
    for token in (0, 255):
        (tmp_path / "config.json").write_text(json.dumps({**WRAPPED_MODELS["granite"], "vocab_size": 512,
                                                          "pad_token_id": token}))
        notes = plan_of(world, {}, model=str(tmp_path), model_overrides=None).notes
        found[token] = [note for note in notes if "pad_token_id" in note]
    assert [note[:33] for note in found[0]] == ["the token 0, which ends documents"]
    assert found[255] == []


@needs_wrapped
def test_notes_name_biases_of_routers_that_are_not_updated(world: Path, tmp_path: Path) -> None:
    found = {}
    for name in ("deepseek_v3", "granite"):
        (tmp_path / "config.json").write_text(json.dumps({**WRAPPED_MODELS[name], "vocab_size": 512}))
        notes = plan_of(world, {}, model=str(tmp_path), model_overrides=None).notes
        found[name] = [note for note in notes if "balances the load" in note]
    assert [note[:49] for note in found["deepseek_v3"]] == ["e_score_correction_bias of 2 routers is not updat"]
    assert found["granite"] == []


@pytest.mark.parametrize(("schedule", "note"), [
    ("0:16,1e3:32,1e9:64", "the run ends before its sequences have 64 tokens"),
    ("0:64,1e3:32,2e3:64", "the sequences get shorter, from 64 to 32 tokens")])
def test_notes_name_lengths_that_fall_or_are_not_reached(world: Path, schedule: str, note: str) -> None:
    notes = plan_of(world, {}, seq_length_schedule=schedule, seq_length=64).notes
    assert [each for each in notes if "seq_length_schedule" in each] == [f"--seq_length_schedule: {note}"]


@pytest.mark.parametrize(("json_changes", "flags", "expected"), [
    ({}, {}, ["no batch size is given: the global batch is 8 x 64 tokens"]),
    ({"optimizer.params.weight_decay": 10}, {"micro_batch_size": 1}, ["weight decay 10: each step at the peak rate "]),
    ({"optimizer.params.weight_decay": 1}, {"micro_batch_size": 1}, []),
    ({"optimizer.params": {"lr": 1e-4, "weight_decay": 10}, "optimizer.type": "Lion"}, {"micro_batch_size": 1}, []),
    ({}, {"global_batch_size": 8, "model_overrides": "resid_pdrop=0.9"},
     ["dropout of more than half of the values (residual 0.9)"]),
    ({"train_batch_size": 8}, {"model_overrides": "resid_pdrop=0.5"}, [])])
def test_notes_name_a_default_batch_and_unusual_regularization(world: Path, json_changes: dict[str, Any],
                                                               flags: dict[str, Any], expected: list[str]) -> None:
    notes = [note for note in plan_of(world, json_changes, world_size=8, **flags).notes
             if note.startswith(("no batch size", "weight decay", "dropout of"))]
    assert [note[:len(start)] for note, start in zip(notes, expected, strict=True)] == expected


@pytest.mark.parametrize(("scaling", "batch", "reference", "optimizer", "expected"), [
    ("sqrt", 8, 8, "AdamW", []), ("sqrt", 32, 8, "AdamW", []), ("linear", 32, 8, "SGD", []),
    ("linear", 32, 8, "AdamW", ["this rule is known to hold for SGD (arXiv 1706.02677), not for adamw; for Adam: "]),
    ("sqrt", 32, 8, "SGD", ["this rule is known to hold for Adam and RMSprop (arXiv 2205.10287), not for sgd; for "]),
    ("sqrt", 8, 256, "AdamW", []),
    ("sqrt", 8, 1024, "AdamW", ["the batches differ by a factor of 128; the linear rule was found to hold up to 32, "]),
    ("sqrt", 8, 32768, "AdamW", ["the batches differ by a factor of 4,096; ", "it holds for batches below "])])
def test_notes_name_scaled_rates_beyond_the_known_range(world: Path, scaling: str, batch: int, reference: int,
                                                        optimizer: str, expected: list[str]) -> None:
    plan = plan_of(world, {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}, world_size=8, lr_scaling=scaling,
                   lr_reference_batch=reference, global_batch_size=batch, split="1,0,0")
    flag = f"--lr_scaling {scaling}: "
    notes = [note.removeprefix(flag) for note in plan.notes if note.startswith(flag)]
    assert notes[0].startswith("the peak learning rate is ")
    assert [note[:len(start)] for note, start in zip(notes[1:], expected, strict=True)] == expected


def test_notes_name_sizes_that_are_slow_on_gpus(world: Path) -> None:
    def notes(device: Device, vocab_size: int) -> list[str]:
        return [note for note in plan_of(world, {}, device=device, model_overrides=f"vocab_size={vocab_size}").notes
                if "no multiple of" in note]

    (note,) = notes(CUDA, 517)
    assert note.startswith("vocabulary 517 is no multiple of 8: --model_overrides vocab_size=576 is one. Gain: ")
    assert notes(CUDA, 576) == notes(dataclasses.replace(CUDA, kind="cpu"), 517) == []


def test_notes_name_faster_operators_that_cannot_be_used(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_words(device: Device, **flags: Any) -> list[str]:
        return [note.split(":")[0] for note in plan_of(world, {}, device=device, micro_batch_size=1,
                                                                  **flags).notes if "vocabulary" not in note][1:]

    monkeypatch.setattr("shutil.which", lambda name: None)
    on_cpu = dataclasses.replace(CUDA, kind="cpu")
    dropping = "attn_pdrop=0.1"
    assert first_words(on_cpu, model_overrides=dropping) == ["attention dropout", "no C compiler"]
    assert first_words(CUDA, model_overrides=dropping, compile_blocks=True) == []
    assert first_words(on_cpu, compile_blocks=True)[0].startswith("--compile_blocks on a CPU")
