"""Each field of TrainingArguments is taken over, has no effect, or is named when a run of the Trainer is adopted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import check_settings
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.extensions.adopt.deepspeed.trainer_settings import (
    DIFFERS,
    NO_EFFECT,
    TAKEN,
    TRAINING_ARGS,
    effects_of_arguments,
    effects_of_module,
    read_training_arguments,
    schedule_of,
)
from pretrain.extensions.adopt.optimizers import WeightDecay
from pretrain.extensions.adopt.run_files import RUN_YAML, ds_config_of, missing_flags, run_files
from tests.extensions.adopt.adopted import EXPERTS, MODELS
from tests.extensions.adopt.foreign import foreign_run
from tests.support.model_shapes import SHAPES


def foreign_json(folder: Path, kind: str) -> dict[str, Any]:
    """Return the ds_config.json of a run with an optimizer of this kind, without clipping and DeepSpeed."""
    params = {"lr": 1e-3, "weight_decay": 0.0, **({"momentum": 0.9} if kind == "SGD" else {})}
    run = foreign_run(folder / kind, SHAPES["llama"], optimizer={"type": kind, "params": params},
                      ds_config={"gradient_clipping": 0.0})
    return ds_config_of(run)[0]


def test_each_field_is_in_one_table() -> None:
    fields = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    tables = (TAKEN, NO_EFFECT, frozenset(DIFFERS))
    assert fields - frozenset().union(*tables) == set(), "classify these fields of TrainingArguments"
    assert sum(map(len, tables)) == len(frozenset().union(*tables))


def saved(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Save TrainingArguments as the Trainer does, and return what is read of them."""
    folder.mkdir(exist_ok=True)
    values = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, **arguments)
    torch.save(values, folder / TRAINING_ARGS)
    return read_training_arguments(folder)


def names_of(arguments: dict[str, Any], ranks: int = 2) -> list[str]:
    return [omission.reason.split()[0] for omission in effects_of_arguments(arguments, ranks=ranks).omissions]


def test_the_defaults_are_equal_here(tmp_path: Path) -> None:
    """No field is missing in the file: each one has a value that the tables can compare."""
    found = saved(tmp_path)
    fields = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    assert fields - found.keys() <= {"debug", "disable_tqdm"}
    effects = effects_of_arguments(found, ranks=2)
    assert (effects.flags, effects.omissions, effects.notes) == ({}, (), ())


def test_settings_without_a_counterpart_are_named(tmp_path: Path) -> None:
    found = saved(tmp_path, neftune_noise_alpha=5.0, train_sampling_strategy="group_by_length",
                  average_tokens_across_devices=False, accelerator_config={"split_batches": True},
                  optim_target_modules=["q_proj"], label_smoothing_factor=0.25)
    named = ["neftune_noise_alpha", "optim_target_modules", "train_sampling_strategy", "average_tokens_across_devices",
             "accelerator_config"]
    assert names_of(found) == named
    assert names_of(found, ranks=1) == [name for name in named if "devices" not in name]
    assert effects_of_arguments(found, ranks=2).flags == {"label_smoothing": 0.25}
    newer = {**saved(tmp_path), "noise_of_a_later_version": 0.5, "later_and_off": None, "_private": 3}
    assert effects_of_arguments(newer, ranks=1).notes == (
        "settings of the Trainer that are not known here: noise_of_a_later_version",)
    older = {"group_by_length": True, "past_index": 2, "split_batches": True, "tf32": True, "past": -1}
    assert names_of(older) == ["group_by_length", "split_batches", "past_index", "tf32"]


@pytest.mark.parametrize(("model", "changes", "with_labels", "flags", "words"), [
    ("mixtral", {}, True, {"router_aux_loss": 0.0}, "router_aux_loss is 0"),
    ("router_logits", {}, True, {}, "output_router_logits true"),
    ("router_logits", {}, False, {"router_aux_loss": 0.0}, "router_aux_loss is 0"),
    ("llama", {"pad_token_id": 7}, True, {}, "pad_token_id 7"), ("llama", {}, True, {}, ""),
    ("gpt2", {"pad_token_id": 7}, True, {}, "")])  # its embedding trains all rows
def test_the_module_of_transformers(model: str, changes: dict[str, Any], with_labels: bool, flags: dict[str, Any],
                                    words: str) -> None:
    found = effects_of_module({**(MODELS | EXPERTS)[model], **changes}, with_labels=with_labels)
    texts = [*found.notes, *(omission.reason for omission in found.omissions)]
    assert found.flags == flags
    assert (words in texts[0]) if words else texts == []


def test_a_schedule_is_complete_or_missing(tmp_path: Path) -> None:
    """Without a counterpart, run.yaml has no schedule, and names the flag that is needed."""
    for kind, settings, is_equal in (("cosine", {}, True), ("cosine", {"num_cycles": 2}, False),
                                     ("inverse_sqrt", {"timescale": 50}, False), ("polynomial", {}, True),
                                     ("polynomial", {"power": 2.0}, False), ("greedy", {}, False)):
        arguments = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": settings, "warmup_steps": 0.1}
        schedule, omissions = schedule_of(arguments, 200, 50)
        run = foreign_run(tmp_path / f"{kind}{json.dumps(settings)}", SHAPES["llama"], schedule=schedule)
        text = run_files(run, WeightDecay(), tmp_path)[RUN_YAML]
        assert ("lr_schedule: " in text) == is_equal
        assert ("lr_warmup_steps: 20" in text) == is_equal
        assert ("lr_schedule" in missing_flags(run)) == (not is_equal)
        assert [omission.name for omission in omissions] == ([] if is_equal else ["schedule"])
        assert is_equal or f"{kind}" in omissions[0].reason


@pytest.mark.parametrize(("kind", "stage"), [("AdamW", 1), ("SGD", 0), ("Adagrad", 0)])
def test_the_json_of_a_run_without_deepspeed_fits_its_optimizer(kind: str, stage: int, tmp_path: Path) -> None:
    """ZeRO does not work with all optimizers: `check` would reject the JSON that the import has written."""
    values = {"train_batch_size": 8, **foreign_json(tmp_path, kind)}
    assert values["zero_optimization"] == {"stage": stage}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    args = parse_arguments(["--deepspeed_config", str(tmp_path / "ds.json"), "--model", "tiny", "--train_steps", "9",
                            "--seq_length", "64", "--train_data", "x", "--save", str(tmp_path / "run")])
    assert check_settings(args, world_size=2, device=cpu_device()).layout.zero_stage == stage


@pytest.mark.parametrize("token", ["*alias", [1], {"a": 1}, 10**9])
def test_a_padding_token_that_transformers_rejects_gets_one_line(token: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: transformers builds no model from it"):
        effects_of_module({**SHAPES["llama"], "pad_token_id": token})
