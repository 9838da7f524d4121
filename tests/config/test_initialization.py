"""Flags of initial weights, muP and dropout: what they change, what a plan says, and what a resume rejects."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.manifest import Manifest, manifest_of
from pretrain.checkpoint.load.resume import make_resume
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.model_of_run import check_initialization_flags
from pretrain.config.plan import Plan
from pretrain.config.validate import check_run
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from tests.support.cases import config, flags

GIVEN = {"mup_base_width": 16, "init_method": "small_init", "output_init_method": "wang_init",
         "embedding_dropout": 0.1, "attention_dropout": 0.2, "residual_dropout": 0.3}


def _plan(corpus: str, folder: Path, **others: Any) -> Plan:
    path = folder / "ds.json"
    path.write_text(json.dumps(config(1)))
    values = flags(corpus, overrides="tie_word_embeddings=false", **others)
    return check_run(parse_arguments([f"--deepspeed_config={path}", f"--save={folder / 'run'}",
                                      *(f"--{name}={value}" for name, value in values.items())]),
                     world_size=1, device=cpu_device())


def _manifest(plan: Plan) -> Manifest:
    """Return the manifest of a checkpoint of this run, as it is read from its file."""
    return Manifest.from_json(manifest_of(plan, step=1, consumed_samples=8, versions={}).to_json())


def test_dropout_flags_change_the_model_but_not_its_config_json(corpus: str, tmp_path: Path) -> None:
    plain, changed = _plan(corpus, tmp_path), _plan(corpus, tmp_path, **GIVEN)
    model = changed.model
    assert (model.embedding_dropout, model.attention_dropout, model.residual_dropout) == (0.1, 0.2, 0.3)
    assert dataclasses.replace(model, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0) == plain.model
    assert model.hf_config == plain.model.hf_config
    off = _plan(corpus, tmp_path, model="gpt2", model_overrides="n_layer=2,n_embd=48", residual_dropout=0)
    assert (off.model.residual_dropout, off.model.attention_dropout) == (0.0, 0.1)


def test_a_plan_shows_the_learning_rates_of_mup(corpus: str, tmp_path: Path) -> None:
    note = next(note for note in _plan(corpus, tmp_path, **GIVEN).notes if "muP" in note)
    assert "4 times as wide" in note
    assert "embeddings aside, is 0.00025, and that of all other parameters 0.001" in note


@pytest.mark.parametrize("flag", ["init_method=small_init", "output_init_method=normal", "init_std=0.1"])
def test_initial_values_are_rejected_for_weights_that_are_loaded(flag: str, corpus: str, tmp_path: Path) -> None:
    name, value = flag.split("=")
    with pytest.raises(ConfigError, match=f"--{name}: it has no effect: .* --init_from other"):
        check_initialization_flags(parse_arguments(["--init_from=other", f"--{flag}"]))
    plan = _plan(corpus, tmp_path, **{name: value})
    imported = dataclasses.replace(_manifest(plan), weights_only=True, step=0)
    with pytest.raises(ConfigError, match=f"--{name}: it has no effect: .* weights of .*global_step0"):
        make_resume(tmp_path / "global_step0", imported, [], plan)


def test_a_resume_needs_the_same_initialization_and_dropout(corpus: str, tmp_path: Path) -> None:
    saved = _manifest(_plan(corpus, tmp_path, **GIVEN))
    folder = tmp_path / "global_step1"
    assert make_resume(folder, saved, [], _plan(corpus, tmp_path, **GIVEN)).warnings == []
    changes = {"mup_base_width": 32, "init_method": "normal", "output_init_method": "normal",
               "embedding_dropout": 0.0, "attention_dropout": 0.0, "residual_dropout": 0.0}
    for name, value in changes.items():
        with pytest.raises(ConfigError, match=f"{name}: .* in the checkpoint and {value} in this run"):
            make_resume(folder, saved, [], _plan(corpus, tmp_path, **{**GIVEN, name: value}))


def test_manifests_of_earlier_versions_stand_for_the_config_json(corpus: str, tmp_path: Path) -> None:
    plain = _plan(corpus, tmp_path)
    old = dataclasses.replace(_manifest(plain), initialization={}, dropouts={})
    folder = tmp_path / "global_step1"
    assert make_resume(folder, old, [], plain).warnings == []
    with pytest.raises(ConfigError, match="residual_dropout"):
        make_resume(folder, old, [], _plan(corpus, tmp_path, residual_dropout=0.1))
    with pytest.raises(ConfigError, match="mup_base_width"):
        make_resume(folder, old, [], _plan(corpus, tmp_path, mup_base_width=32))
