"""Settings of other training programs: each one is a flag here, or its error names what to use, or it is known to have
no counterpart.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from pretrain.cluster.launcher_flags import launcher_parser
from pretrain.config.ds_json.check_keys import check_json_keys
from pretrain.config.ds_json.read import DsFile
from pretrain.config.ds_json.schema import TREE
from pretrain.config.flags.arguments import FLAGS
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.other_programs import hint_for, hints
from pretrain.errors import ConfigError
from tests.support.launch import ROOT
from tests.support.rejection import rejection

PROGRAMS = json.loads((ROOT / "tests/golden/other_programs.json").read_text(encoding="utf-8"))
EACH_PROGRAM = pytest.mark.parametrize("program", PROGRAMS)


@EACH_PROGRAM
def test_each_known_setting_is_a_flag_or_has_a_hint(program: str) -> None:
    for name in PROGRAMS[program]["known"].split():
        if name in FLAGS:
            continue
        for word in (f"--{name}", f"--{name.replace('_', '-')}=1"):
            caught = rejection(parse_arguments, [word, "1"] if "=" not in word else [word])
            assert hint_for(name).rstrip(":")[1:] in caught, f"{program}: {caught}"


@EACH_PROGRAM
def test_settings_without_a_counterpart_have_no_hint(program: str) -> None:
    names = PROGRAMS[program]["without_counterpart"].split()
    assert [name for name in names if name in FLAGS or hint_for(name)] == []


def test_the_trainers_settings_are_complete() -> None:
    """A new field of transformers.TrainingArguments needs a line in the table or in the list of names without one."""
    trainer = PROGRAMS["transformers.Trainer"]
    listed = {*trainer["known"].split(), *trainer["without_counterpart"].split()}
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= listed


def test_hints_name_flags_keys_and_files_that_exist() -> None:
    launcher = {flag for action in launcher_parser("")._actions for flag in action.option_strings}
    keys = set(re.findall(r'"(\w+)"', json.dumps(TREE, default=lambda key: None))) | {"params"}
    for hint in set(hints().values()):
        for flag in re.findall(r"--(\w+)", hint):
            assert flag in FLAGS or f"--{flag}" in launcher or flag in ("help", "tasks"), hint
        assert set(re.findall(r'"(\w+)": ', hint)) <= keys, hint
        assert all(Path(ROOT, path).exists() for path in re.findall(r"tools/\w+\.py", hint)), hint


@pytest.mark.parametrize(("where", "line", "hint"), [
    ({"seq_length": 5}, "", "--seq_length is a flag of the run"),
    ({"train-iters": 5, "num_layers": 4}, "found unknown keys: train-iters, num_layers", "Here it is --train_steps"),
    ({"zero_optimization": {"stage": 1, "num_train_epochs": 1}}, "", "Here it is --train_steps or --train_tokens"),
])
def test_keys_of_a_json_get_the_same_hints(where: dict[str, object], line: str, hint: str) -> None:
    caught = rejection(check_json_keys, DsFile("ds.json", where))
    assert line in caught
    assert hint in caught


def test_one_error_names_all_unknown_flags() -> None:
    words = ["--num-train-epochs", "3", "--seed", "1", "--max_grad_norm=1", "--svae", "x"]
    assert rejection(parse_arguments, words) == (
        "--num-train-epochs: there is no such flag. Here it is --train_steps or --train_tokens. "
        "--max_grad_norm: there is no such flag. Here it is --gradient_clipping. "
        '--svae: there is no such flag. Did you mean "--save"?')


def test_keys_of_a_yaml_get_the_same_hints(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("per-device-train-batch-size: 4\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run.yaml:1: per_device_train.*Here it is --micro_batch_size\."):
        parse_arguments(["--config", str(tmp_path / "run.yaml")])
