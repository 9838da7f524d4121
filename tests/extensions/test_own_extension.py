"""The extension of pretrain/extensions/README.md, outside of the package: loaded by a flag, a YAML, an entry point."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.commands import COMMANDS, add_commands
from pretrain.errors import REJECTED, ConfigError
from pretrain.extension import Command, Extension
from pretrain.monitor.read_run_folder import read_rows
from tests.support.cases import config, flags
from tests.support.launch import ROOT, train_ranks

NAME = "stop_at_loss:EXTENSION"
CODE = re.findall(r"```python\n(.*?)```", (ROOT / "pretrain/extensions/README.md").read_text(), re.DOTALL)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the module; `installed/` also has an entry point, as pip would install it."""
    folder = tmp_path_factory.mktemp("own")
    metadata = folder / "installed" / "stop_at_loss-1.5.dist-info"
    metadata.mkdir(parents=True)
    for place in (folder, folder / "installed"):
        (place / "stop_at_loss.py").write_text(CODE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stop-at-loss\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[ds_pretrain.extensions]\nstop_at_loss = {NAME}\n")
    return folder


def program(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    return subprocess.run([sys.executable, "-m", "pretrain", *words], cwd=folder, env=environ, capture_output=True,
                          text=True, check=False)


def train(folder: Path, corpus: str, stage: int, *words: str, steps: int = 12, **others: Any) -> str:
    (folder / "ds.json").write_text(json.dumps(config(stage, micro=2)))
    given = {**flags(corpus, layers=1, hidden=32, steps=steps), "save": "run", "log_interval": 1, "eval_interval": 0,
             "save_interval": 2, **others}
    done = train_ranks(2, ["--deepspeed_config=ds.json", *(f"--{key}={value}" for key, value in given.items()), *words],
                       folder)
    output = done[0].stdout + done[1].stdout
    assert [rank.returncode for rank in done] == [0, 0], output
    return output


def test_its_state_survives_a_stop_another_layout_and_a_run_without_it(folder: Path, corpus: str) -> None:
    """The first start logs two losses below the limit, one without the extension trains on, the third one more."""
    words = ("--extension", NAME, "--stop_loss", "1000")
    train(folder, corpus, 1, *words, exit_step=2)
    assert _states(folder, 2)["stop_at_loss"] == {"below": 2}
    without = train(folder, corpus, 3, exit_step=4)
    assert "the checkpoint has a state of stop_at_loss, whose extension this run has not loaded" in without
    assert _states(folder, 4)["stop_at_loss"] == {"below": 2}
    train(folder, corpus, 3, *words)
    stop = [row for row in read_rows(folder / "run/events.jsonl") if row["event"] == "stop"][-1]
    assert (stop["step"], stop["reason"]) == (5, "--stop_loss")
    start = json.loads((folder / "run/run.json").read_text())[-1]
    assert (start["flags"]["stop_loss"], start["extensions"]["stop_at_loss"]) == (1000.0, f"--extension {NAME}")
    lowest = program(folder, "--extension", NAME, "lowest", "run")
    assert float(lowest.stdout) == min(row["loss"] for row in read_rows(folder / "run/metrics.jsonl") if "loss" in row)


def _states(folder: Path, step: int) -> dict[str, Any]:
    return read_manifest(folder / f"run/checkpoints/global_step{step}").recipe_states


def test_an_entry_point_needs_no_flag(folder: Path) -> None:
    path = str(folder / "installed")
    listed = program(folder, "extensions", path=path).stdout
    assert "stop_at_loss (package stop-at-loss 1.5): Stops a run at a loss.\n  flags: --stop_loss\n" in listed
    assert "lowest         print the lowest loss" in program(folder, "--help", path=path).stdout
    assert "stop when 3 logged losses" in program(folder, "reference", "flags", path=path).stdout
    assert "there is no subcommand 'lowest'" in program(folder, "lowest", "run").stderr
    (folder / "installed" / "stop_at_loss.py").write_text("1 / 0\n")
    done = program(folder, "--help", path=path)
    assert done.returncode == 0
    start = "ds-pretrain: warning: the extension stop_at_loss of the package stop-at-loss is left out: ZeroDivision"
    assert done.stderr.startswith(start), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_flag_may_stand_in_front_of_a_subcommand_and_other_extensions_in_a_yaml(folder: Path) -> None:
    """A key of an extension may be a list; the flag of the command line wins."""
    (folder / "listed.py").write_text(CODE.replace('Extension("stop_at_loss"', 'Extension("listed"').replace(
        "stop_loss: float | None = GROUP.flag(None,", "my_words: list[str] | None = GROUP.flag(None,").replace(
        ", above=0)", ")").replace("plan.args.of(Flags).stop_loss", "1.0").replace('"lowest": ', '"own": '))
    (folder / "own.yaml").write_text("extension: listed:EXTENSION\nmy_words: [a, b]\nmodel: gpt2\nsave: new\n"
                                     "deepspeed_config: zero1_bf16\ntrain_steps: 5\nlearning_rate: -1\n")
    for words in (["check", "--world_size", "1", "--config", "own.yaml"],
                  ["--extension", "listed:EXTENSION", "check", "--world_size", "1", "--config", "own.yaml"]):
        assert "--learning_rate: found -1.0; expected above 0" in program(folder, *words).stderr
    done = program(folder, "--extension", NAME, "listed:EXTENSION", "own", "--help")
    assert "Print the lowest training loss of a run." in done.stdout


_ADDS = """from pretrain.extension import Extension
def add(commands):
    commands.add_parser("count").set_defaults(function=lambda flags: 3)
EXTENSION = Extension("adds", "Adds a subcommand.", extends={"data": add})
"""


def test_it_adds_a_subcommand_to_data(folder: Path) -> None:
    (folder / "adds.py").write_text(_ADDS)
    assert program(folder, "--extension", "adds:EXTENSION", "data", "count").returncode == 3
    assert program(folder, "data", "count").returncode == REJECTED


def test_one_extension_may_replace_a_subcommand_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "export", COMMANDS["export"])  # restored at the end
    command = Command("run", "export, and more", "more", replaces=True)
    add_commands(Extension("first", "", commands={"export": command}))
    assert COMMANDS["export"] == command
    with pytest.raises(ConfigError, match="extension second: there is a subcommand export already"):
        add_commands(Extension("second", "", commands={"export": command}))


@pytest.mark.parametrize(("words", "line"), [
    (["--extension", "added:EXTENSION"], "extension adds: nothing can be added to a subcommand check"),
    (["--extension", "named:EXTENSION"], "extension stop_at_loss: a run has a flag --config already"),
    (["--extension", "commands:EXTENSION"], "extension stop_at_loss: there is a subcommand check already"),
    (["--extension", NAME, "--stop_loss", "-1"], "--stop_loss: found -1.0; expected above 0"),
    (["--extension", NAME, "--stop_loss", "low"], "--stop_loss: found 'low'; expected a number"),
    (["--stop_loss", "3"], "--stop_loss: there is no such flag"),
    (["--extension", "stop_at_loss"], "--extension: found stop_at_loss; expected a module and a name in it"),
    (["--extension", "no_such:EXTENSION"], "--extension no_such:EXTENSION: there is no module no_such"),
    (["--extension", "stop_at_loss:Flags"], "--extension stop_at_loss:Flags: found a type; expected an Extension"),
    (["--extension", "broken:EXTENSION"], "--extension broken:EXTENSION: the import of broken failed: ZeroDivision"),
    (["--extension", "second:EXTENSION", NAME], "the extension second also has the flag --stop_loss"),
    (["--extension", "newer:EXTENSION"], "it was written for version 2 of the interface, and this ds-pretrain has"),
    (["--extension", "core:EXTENSION"], "a run has a flag --train_steps already"),
])
def test_wrong_extensions_get_one_line(words: list[str], line: str, folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "second.py").write_text(CODE.replace('Extension("stop_at_loss"', 'Extension("second"'))
    (folder / "newer.py").write_text(CODE.replace('Extension("stop_at_loss"', 'Extension("newer", api=2, summary=""'
                                                  ).replace(', "Stops a run at a loss."', ""))
    (folder / "named.py").write_text(CODE.replace("stop_loss: float", "config: float"))
    (folder / "commands.py").write_text(CODE.replace('"lowest": Command', '"check": Command'))
    (folder / "added.py").write_text(_ADDS.replace('"data"', '"check"'))
    (folder / "core.py").write_text(CODE.replace("stop_loss: float", "train_steps: float"))
    done = program(folder, "check", "--world_size", "1", "--deepspeed_config", "zero1_bf16", "--model", "gpt2",
                   "--save", "new", *words)
    assert (done.returncode, line in done.stderr) == (REJECTED, True), done.stderr
    assert "broken" in line or "Traceback" not in done.stderr
