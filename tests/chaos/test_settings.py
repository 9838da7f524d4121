"""Commands and flags with which tools/chaos.py cannot work are rejected before anything runs."""

from pathlib import Path

import pytest

from pretrain.chaos.kinds import KINDS
from pretrain.chaos.settings import ChaosSettings, make_settings
from pretrain.errors import ConfigError

LAUNCHER = ["ds-pretrain", "--num_accelerators", "2", "--"]


def settings(words: list[str], *, kinds: str | None = None, faults: int = 10,
             reference: str | None = None) -> ChaosSettings:
    return make_settings(words, kinds=kinds, faults=faults, seed=0, reference=reference, stall_s=1.0)


def train(run: Path, *words: str) -> list[str]:
    return ["--model", "tiny", "--train_data", "data/corpus", "--train_steps", "50", "--save", str(run), *words]


@pytest.mark.parametrize(("words", "kinds", "message"), [
    (["--train_steps", "9"], None, "--faults: 10 faults need at least 10 steps, and the run has 9"),
    ([], "kill_rnak", 'Did you mean "kill_rank"?'),
    ([], "hang", "--step_timeout is 600 s"),
    ([], "bit_flip", "Add kill_rank"),
    (["--save_interval", "0"], "bit_flip,kill_rank", "--save_interval"),
    (["--train_stepz", "9"], None, 'Did you mean "--train_steps"?'),
])
def test_wrong_flags_are_rejected(tmp_path: Path, words: list[str], kinds: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings([*LAUNCHER, *train(tmp_path / "run", *words)], kinds=kinds)
    assert message in str(error.value)


def test_wrong_commands_are_rejected(tmp_path: Path) -> None:
    flags = train(tmp_path / "run")
    for command, message in (
            ([], "COMMAND is missing"), (["sleep", "5"], "are not in the command"),
            (["ds-pretrain", "--hostfile", "hosts", "--", *flags], "on this host only"),
            ([*LAUNCHER, *[word.replace("_steps", "_tokens") for word in flags]], "--train_steps")):
        with pytest.raises(ConfigError) as error:
            settings(command)
        assert message in str(error.value)


def test_folders_of_other_runs_are_rejected(tmp_path: Path) -> None:
    flags = train(tmp_path / "run")
    with pytest.raises(ConfigError, match="not a reference"):
        settings([*LAUNCHER, *flags], reference=str(tmp_path / "run-reference"))
    for name in ("run-reference", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("[]")
        with pytest.raises(ConfigError, match="this folder has a run already"):
            settings([*LAUNCHER, *flags])


def test_both_runs_get_the_same_command_with_their_own_folders(tmp_path: Path) -> None:
    flags = train(tmp_path / "run", "--step_timeout", "20")
    found = settings([*LAUNCHER, *flags])
    assert found.reference_command == [*LAUNCHER, *flags, "--save", f"{tmp_path}/run-reference", "--log_interval", "1"]
    assert found.command == [*LAUNCHER, *flags, "--save", f"{tmp_path}/run", "--log_interval", "1", "--train_data",
                             f"{tmp_path}/run/chaos/data/corpus"]
    assert found.kinds == tuple(KINDS)
    assert "hang" not in settings([*LAUNCHER, *train(tmp_path / "run")]).kinds


def test_of_a_blend_the_first_source_is_linked(tmp_path: Path) -> None:
    blend = ["--train_data", "0.5", "data/web", "0.5", "data/code"]
    found = settings([*LAUNCHER, *train(tmp_path / "run", *blend)])
    assert found.command[-5:] == ["--train_data", "0.5", f"{tmp_path}/run/chaos/data/web", "0.5", "data/code"]
    assert found.train_data == "data/web"
