"""The tables of settings, compared with transformers' own."""

import dataclasses
import json
from pathlib import Path

from transformers import TrainingArguments

from pretrain.extensions.translate.main import translate
from pretrain.extensions.translate.settings import Settings, defaults_of


def test_the_trainers_defaults_are_transformers_own() -> None:
    """`ds-pretrain translate` writes them where the input leaves settings out."""
    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for name, value in defaults_of("trainer").items():
        if name in fields and fields[name] is not None:
            assert value == getattr(fields[name], "value", fields[name]), name


def test_a_dump_of_the_trainers_settings_is_translated(tmp_path: Path) -> None:
    dump = json.loads(TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=10).to_json_string())
    result = translate(Settings("trainer", {**dump, "config_name": "tiny"}))
    assert dump.keys() <= result.rows.keys()
    assert [name for name, row in result.rows.items() if "CHECK" in row.text or "MATTERS" in row.text] == []
    assert (result.run["train_steps"], result.run["min_lr"], result.json["optimizer"]["params"]["lr"]) == (10, 0, 5e-5)
