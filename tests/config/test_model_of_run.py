"""Settings that may differ from the weights that a run starts from, and weights that a run does not use."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.model_of_run import check_same_parameters
from pretrain.config.validate import check_run
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, load_model_config
from tests.support.hf_models import save_hf_model
from tests.support.launch import ROOT
from tests.support.model_shapes import SHAPES, write_config
from tests.support.rejection import rejection
from tests.wrong_inputs.world import make_world

_SILENT = {"architecture", "hf_config", "key_names"}
_NOTED = {"embedding_dropout", "attention_dropout", "residual_dropout", "initializer_range", "scale_residual_init",
          "norm_eps", "max_positions", "rope_theta", "rope_scaling", "local_rope_theta", "windows"}


def _other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"other {value}" if isinstance(value, str) else {"other": 1} if not value else None


def _compare(saved: ModelConfig, run: ModelConfig) -> list[str]:
    return check_same_parameters(saved, run, folder=Path("weights"), model="other", overrides=None)


def test_every_setting_of_a_model_is_rejected_noted_or_no_setting(tmp_path: Path) -> None:
    saved = load_model_config(write_config(tmp_path, SHAPES["llama"]))
    outcomes: dict[str, set[str]] = {"silent": set(), "noted": set(), "rejected": set()}
    others = {"architecture": "gpt2", "key_names": {**saved.key_names, "hidden_size": "width"}}
    for field, value in vars(saved).items():
        if field == "implementation":  # its layers are compared by their parameters
            continue
        changed = replace(saved, **{field: others.get(field, _other(value))})
        if field in _SILENT | _NOTED:
            outcomes["noted" if _compare(saved, changed) else "silent"].add(field)
        else:
            with pytest.raises(ConfigError, match=f"--model other: {saved.key(field)}: found"):
                _compare(saved, changed)
            outcomes["rejected"].add(field)
    assert outcomes["silent"] == _SILENT
    assert outcomes["noted"] == _NOTED
    assert {"vocab_size", "num_heads", "activation", "qk_norm", "tie_word_embeddings"} <= outcomes["rejected"]


def test_learned_positions_are_parameters(tmp_path: Path) -> None:
    saved = load_model_config(write_config(tmp_path, SHAPES["gpt2"]))
    with pytest.raises(ConfigError, match="n_positions: found 65; expected 64"):
        _compare(saved, replace(saved, max_positions=65))


def test_the_vocabulary_of_existing_weights_is_not_extended(corpus: str, tmp_path: Path) -> None:
    """No remedy for tokens beyond the vocabulary of a published model leads to another rejection of the vocabulary."""
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    ids = {"<|endoftext|>": 199, **{f"w{number}": number for number in range(199)}}
    Tokenizer(WordLevel(ids, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    args = RunArguments(deepspeed_config=str(ROOT / "ds_configs/zero1_bf16.json"), train_data=corpus, seq_length=16,
                        train_steps=5, save=str(tmp_path / "run"), init_from=str(tmp_path / "hf"))
    tokenizer, larger = {"tokenizer": str(tmp_path / "tokenizer.json")}, {"model_overrides": "vocab_size=256"}
    for flags, found in (({}, r"found token 2\d\d"), (tokenizer, "--tokenizer .*: found 200 tokens"),
                         (larger, "--model_overrides: vocab_size: found 256; expected 97"),
                         ({**larger, "model": str(tmp_path / "hf")}, "vocab_size: found 256; expected 97")):
        line = rejection(check_start, replace(args, **flags), world_size=1, device=cpu_device())
        assert re.search(found, line)
        assert "existing weights is not extended" in line
        assert "--model_overrides vocab_size" not in line
        assert "leave --model out" not in line
    untrained = rejection(check_run, replace(args, init_from=None, model=str(tmp_path / "hf")), world_size=1,
                          device=cpu_device())
    assert "--model_overrides vocab_size=" in untrained


def test_weights_next_to_a_config_are_noted(tmp_path: Path) -> None:
    make_world(tmp_path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    args = RunArguments(deepspeed_config=str(tmp_path / "ds.json"), train_data=str(tmp_path / "few"), seq_length=16,
                        train_steps=5, save=str(tmp_path / "run"))

    def notes(model: Path) -> list[str]:
        plan = check_run(replace(args, model=str(model)), world_size=1, device=cpu_device())
        return [note for note in plan.notes if "weights" in note]

    for model in (tmp_path / "hf", tmp_path / "hf" / "config.json"):
        [note] = notes(model)
        assert note.startswith(f"--model {model}: the folder holds weights (model.safetensors), which are not used")
        assert note.endswith(f"--init_from {tmp_path / 'hf'} starts from them")
    assert notes(tmp_path / "plain") == []
    (tmp_path / "plain" / "pytorch_model-00001-of-00002.bin").touch()
    assert len(notes(tmp_path / "plain")) == 1


def test_checkpoints_that_do_not_fit_the_disk_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_world(tmp_path)
    args = RunArguments(deepspeed_config=str(tmp_path / "ds.json"), train_data=str(tmp_path / "corpus"), seq_length=16,
                        train_steps=50, save=str(tmp_path / "new" / "run"), model="tiny")
    size = check_run(args, world_size=1, device=cpu_device())
    one = size.layout.checkpoint_bytes(size.model.num_parameters())

    def notes(free: int, **flags: int) -> list[str]:
        monkeypatch.setattr("pretrain.checkpoint.load.start.free_bytes", lambda _: free)
        plan = check_start(replace(args, **flags), world_size=1, device=cpu_device()).plan
        return [note for note in plan.notes if note.startswith(f"--save {args.save}: the disk has")]

    for number, flags in ((1, {}), (1, {"save_interval": 0}), (5, {"save_interval": 10}), (6, {"save_interval": 9}),
                          (3, {"save_interval": 10, "keep_checkpoints": 2}),
                          (5, {"save_interval": 10, "keep_checkpoints": 9})):
        assert notes(number * one, **flags) == []
        [note] = notes(number * one - 1, **flags)
        assert (f"{number} checkpoints of" if number > 1 else "a checkpoint of") in note
        assert ("--keep_checkpoints 2 removes" in note) == (number > 3 and not flags.get("keep_checkpoints"))


def test_a_tokenizer_that_may_not_be_that_of_the_weights_is_noted(tmp_path: Path) -> None:
    make_world(tmp_path)
    args = RunArguments(deepspeed_config=str(tmp_path / "ds.json"), train_data=str(tmp_path / "few"), seq_length=16,
                        train_steps=5, save=str(tmp_path / "run"), init_from=str(tmp_path / "hf"))

    def notes(**flags: str) -> list[str]:
        plan = check_start(replace(args, **flags), world_size=1, device=cpu_device()).plan
        return [note for note in plan.notes if "tokenizer of the weights" in note]

    assert notes(tokenizer=str(tmp_path)) == []  # the weights have no tokenizer
    (tmp_path / "hf" / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert notes(tokenizer=str(tmp_path)) == notes() == []
    (tmp_path / "hf" / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes() + b" ")
    assert notes(tokenizer=str(tmp_path)) == [
        f"--tokenizer {tmp_path} is another file than the tokenizer of the weights ({tmp_path / 'hf'}): make sure that "
        "both have the same tokens"]
    assert notes() == []  # the data does not say which tokenizer prepared it
    (tmp_path / "few.meta.json").write_text(json.dumps({"tokenizer_sha256": "ab" * 32}))
    [note] = notes()
    assert note.startswith("the tokenizer of --train_data is another file")
