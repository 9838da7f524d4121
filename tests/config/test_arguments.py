"""Flags with two names, on the command line and in the YAML file."""

from pathlib import Path

import pytest

from pretrain.cluster.supervise.launch_command import run_setting
from pretrain.config.flags.arguments import parse_arguments
from pretrain.errors import ConfigError


def test_exit_at_step_is_exit_step(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("exit-at-step: 7\n")
    assert parse_arguments(["--config", str(path)]).exit_step == 7
    assert parse_arguments(["--config", str(path), "--exit-at-step=5"]).exit_step == 5
    assert parse_arguments(["--exit_at_step", "6"]).exit_step == 6
    assert run_setting(["train.py", "--exit_at_step", "9"], "exit_step") == "9"
    path.write_text("exit_at_step: 7\nexit_step: 8\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: exit_step: the same key is on line 1"):
        parse_arguments(["--config", str(path)])
