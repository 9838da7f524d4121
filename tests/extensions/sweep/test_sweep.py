"""The sweep of its page over real runs, with the real Optuna: search, pruning, resume, edges, plots."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.errors import ConfigError
from pretrain.extensions.sweep.main import edges
from pretrain.extensions.sweep.sweep_file import Dimension, read_sweep
from tests.support.cases import config, flags
from tests.support.launch import PROGRAM

pytest.importorskip("optuna")
SPACE = {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "weight_decay": [0.0, 0.1],
         "lr_warmup_steps": {"low": 1, "high": 4}}


def write(place: Path, **others: Any) -> None:
    """Write the file of a sweep of 12 runs in less than 40 lines."""
    values = {"config": "run.yaml", "folder": "sweep", "runs": 12, "ranks": 2, "parallel": 2,
              "flags": {"train_steps": 6, "eval_interval": 2}, "space": SPACE, **others}
    text = yaml.safe_dump({name: value for name, value in values.items() if value is not None})
    assert len(text.splitlines()) <= 40
    (place / "sweep.yaml").write_text(text)


@pytest.fixture
def folder(tmp_path: Path, corpus: str) -> Path:
    values = config(1, micro=2)
    values["optimizer"]["params"] = {"lr": "auto", "weight_decay": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    run = {**flags(corpus, layers=1, hidden=32, steps=6), "deepspeed_config": "ds.json", "log_interval": 2,
           "save_interval": 0, "save": "unused"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    write(tmp_path)
    return tmp_path


def sweep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, PROGRAM, "sweep", "sweep.yaml", *words], cwd=folder, env=environ,
                          capture_output=True, text=True, timeout=900, check=False)


def test_12_runs_of_two_ranks_find_the_best_and_are_continued_after_a_kill(folder: Path) -> None:
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen([sys.executable, PROGRAM, "sweep", "sweep.yaml"], cwd=folder, env=environ,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    for line in first.stderr:
        if "valid loss" in line:
            break
    time.sleep(1)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=200) == 130
    begun = sorted(path.name for path in (folder / "sweep").glob("run_*") if path.is_dir())
    done = sweep(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(sweep(folder, "--results", "--json").stdout)
    assert len(shown["runs"]) == 12
    assert {"run_000"} <= set(begun)
    losses = [run["loss"] for run in shown["runs"] if run["loss"] is not None]
    assert losses == sorted(losses)
    assert len(losses) >= 3
    assert {run["state"] for run in shown["runs"]} <= {"complete", "pruned"}
    assert len({run["run"] for run in shown["runs"]}) == 12
    assert f"{losses[0]:.4f}" in done.stdout
    assert "complete" in done.stdout
    pytest.importorskip("matplotlib")
    assert {"parallel_coordinates.png", "slices.png", "importance.png"} <= {
        path.name for path in (folder / "sweep").glob("*.png")}


def test_a_random_sweep_without_pruning_repeats_its_values(folder: Path) -> None:
    found = []
    for name in ("one", "two"):
        write(folder, folder=name, runs=2, sampler="random", prune=False, ranks=1, parallel=1)
        assert sweep(folder).returncode == 0
        found.append([run["flags"] for run in json.loads(sweep(folder, "--results", "--json").stdout)["runs"]])
    assert found[0] == found[1]


def test_rejected_runs_end_the_sweep_with_their_line(folder: Path) -> None:
    write(folder, space={"lr_warmup_steps": {"low": 6, "high": 900}}, ranks=1, parallel=1, seed=3)
    done = sweep(folder)
    assert done.returncode == 2
    assert "3 runs in a row were rejected: --lr_warmup_steps: found" in done.stderr


def test_a_value_at_the_edge_of_its_range_gets_a_line() -> None:
    space = (Dimension("learning_rate", low=1e-4, high=1e-1, log=True), Dimension("seed", low=0, high=100),
             Dimension("weight_decay", choices=(0.0, 0.1)))
    assert edges(space, {"learning_rate": 0.09, "seed": 2, "weight_decay": 0.1}) == [
        "learning_rate: the best value, 0.09, lies at the upper edge of 0.0001 to 0.1: extend high",
        "seed: the best value, 2, lies at the lower edge of 0 to 100: extend low"]
    assert edges(space, {"learning_rate": 1e-2, "seed": 50}) == []


@pytest.mark.parametrize(("wrong", "line"), [
    ({"spce": {}}, 'spce: found an unknown key; expected config, folder, runs, space'),
    ({"space": {}}, "space: found nothing; expected at least one flag"),
    ({"space": {"learning_rat": [1]}}, 'space.learning_rat: found an unknown key'),
    ({"space": {"save": ["a"]}}, "space.save: the sweep sets this flag."),
    ({"space": {"seed": {"low": 3, "high": 3}}}, "space.seed: found low 3, high 3; expected low below high."),
    ({"space": {"seed": {"low": "1e-4", "high": 3}}}, "space.seed.low: found '1e-4'; expected a number"),
    ({"space": {"seed": {"low": 1, "high": 3, "log": 1}}}, "space.seed.log: found 1; expected true or false"),
    ({"space": {"seed": 5}}, "space.seed: found 5; expected a list of choices, or {low: NUMBER, high: NUMBER}"),
    ({"flags": {"sed": 5}}, 'flags.sed: found an unknown key'),
    ({"runs": 0}, "runs: found 0; expected a whole number from 1 to 10000."),
    ({"runs": None}, "runs: the key is missing."),
    ({"sampler": "grid"}, "sampler: found grid; expected tpe, random."),
    ({"prune": "often"}, "prune: found 'often'; expected true or false."),
    ({"devices": ["0"], "parallel": 2}, "parallel: found 2; expected at most 1, the number of devices.")])
def test_wrong_files_get_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any],
                                  line: str) -> None:
    monkeypatch.chdir(folder)
    write(folder, **wrong)
    with pytest.raises(ConfigError) as error:
        read_sweep("sweep.yaml")
    assert str(error.value).startswith(f"sweep.yaml: {line}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "line"), [("a: [", "sweep.yaml: it is not YAML: line"),
                                            ("- 1", "sweep.yaml: found list; expected a mapping")])
def test_files_that_are_no_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_sweep("sweep.yaml")
    assert str(error.value).startswith(line)


def test_the_first_values_are_validated_before_a_run(folder: Path) -> None:
    write(folder, flags={"train_steps": -1})
    done = sweep(folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--train_steps: found -1; expected at least 1." in done.stderr
    assert not (folder / "sweep").exists()
    done = sweep(folder, "--results")
    assert "has no runs of a sweep yet. Start it without --results." in done.stderr
