"""pretrain/api.py: plans, launches of two ranks, training inside of ranks, reading; and the notebook of its page."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain import api
from pretrain.callback import Callback
from pretrain.errors import STOPPED, ConfigError
from tests.support.cases import config, flags
from tests.support.launch import ROOT, run_ranks

SIGNATURES = {
    "Result": ["exit_code", "run"], "RunFiles": ["run", "metrics", "evaluations", "events", "starts"],
    "RunPlan": ["words", "ranks", "plan"], "launch": ["plan", "ranks", "callbacks", "quiet"],
    "load_model": ["run", "step", "dtype", "device"], "make_plan": ["config", "ranks", "flags"],
    "read_run": ["folder"], "train": ["plan", "callbacks"]}


class OfThisModule(Callback):
    """A callback of an importable module."""


@pytest.fixture
def given(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the flags of a run of 6 steps in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    return {**flags(corpus, layers=1, hidden=32, steps=6), "deepspeed_config": tmp_path / "ds.json", "save": "run",
            "log_interval": 1, "eval_interval": 3, "save_interval": 3}


def test_the_names_and_their_arguments_are_stable() -> None:
    assert {name: list(inspect.signature(getattr(api, name)).parameters) for name in SIGNATURES} == SIGNATURES
    assert {*api.__all__} == {*SIGNATURES, "ConfigError"}


def test_a_plan_is_that_of_check_and_predicts_memory_and_time(given: dict[str, Any]) -> None:
    plan = api.make_plan(ranks=2, **given)
    assert (plan.plan.layout.world_size, plan.plan.train_steps, plan.run) == (2, 6, Path("run"))
    assert plan.memory().needed_bytes > 100_000
    assert plan.estimates()["step_seconds"] > 0
    assert plan.estimates(gpu="h100")["step_seconds"] > 0
    mapping = api.make_plan(**{**given, "model_overrides": {"vocab_size": 256, "n_layer": 3, "n_embd": 32}})
    assert mapping.plan.model.num_layers == 3
    assert not Path("run/metrics.jsonl").exists()


@pytest.mark.parametrize(("wrong", "line"), [
    ({"sav": "x"}, '--sav: there is no such flag. Did you mean "--save"?'),
    ({"train_steps": -1}, "--train_steps: found -1; expected at least 1."),
    ({"seed": object()}, "seed=: found object; expected a number, a text, a path, True, False or a list."),
    ({"ranks": 0}, "ranks: found 0; expected a whole number from 1."),
    ({"config": "none.yaml"}, "--config none.yaml: the file cannot be read: No such file or directory.")])
def test_a_wrong_plan_is_the_line_of_the_command(given: dict[str, Any], wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        api.make_plan(**{**given, **wrong})
    assert str(error.value) == line


def test_callbacks_that_ranks_cannot_import_are_rejected() -> None:
    class Local(Callback):
        pass

    assert api.callback_name(OfThisModule) == "tests.test_api:OfThisModule"
    assert api.callback_name("some:Name") == "some:Name"
    for wrong in (Local, OfThisModule(), Path):
        with pytest.raises(ConfigError) as error:
            api.callback_name(wrong)  # type: ignore[arg-type]
        assert "my_module:" in str(error.value)
        assert "\n" not in str(error.value)


CALLBACK = """from pretrain.callback import Callback
class Early(Callback):
    def end_step(self, run):
        if run.step == 4 and not run.first_step:
            run.event("early", reason="the callback")
            run.stop("the callback")
"""


def test_a_launch_of_two_ranks_stops_resumes_and_is_read(given: dict[str, Any], tmp_path: Path,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "early.py").write_text(CALLBACK)
    plan = api.make_plan(**given)
    first = api.launch(plan, ranks=2, callbacks=["early:Early"])
    assert (first.exit_code, first.finished) == (STOPPED, False)
    assert list(first.losses) == [1, 2, 3, 4]
    assert "step       4/6" in capfd.readouterr().out
    second = api.launch(plan, ranks=2, callbacks=["early:Early"], quiet=True)
    assert second.finished
    assert capfd.readouterr().out == ""
    assert list(second.losses) == [1, 2, 3, 4, 5, 6]
    assert list(second.evaluations["valid"]) == [3, 6]
    run = api.read_run("run")
    assert [row["step"] for row in run.events if row["event"] == "early"] == [4]
    assert run.metrics["grad_norm"].dtype == np.float64
    assert len(run.starts) == 2
    with pytest.raises(ConfigError, match="expected metrics, events, valid"):
        run.frame("vald")
    pandas = pytest.importorskip("pandas")
    assert isinstance(run.frame(), pandas.DataFrame)
    assert list(run.frame("valid")["step"]) == [3, 6]


def test_the_model_of_a_run_has_its_loss(given: dict[str, Any], tmp_path: Path) -> None:
    import torch

    result = api.launch(api.make_plan(**given), quiet=True)
    model = api.load_model("run", step=3)
    tokens = torch.arange(32).reshape(1, 32)
    assert 5 < float(model(tokens, labels=tokens).loss) < 6.5
    assert result.finished
    with pytest.raises(ConfigError, match="dtype: found int8"):
        api.load_model("run", dtype="int8")
    with pytest.raises(ConfigError, match="not a run folder"):
        api.read_run(tmp_path)


PROGRAM = """import sys
from pretrain.api import make_plan, train
from pretrain.callback import Callback

class Rows(Callback):
    def after_row(self, run, row):
        if "split" not in row:
            run.screen.line(f"row {row['step']}")

plan = make_plan(**eval(sys.argv[1]))
result = train(plan, [Rows(), "early:Early"])
print("ended", result.exit_code, flush=True)
sys.exit(result.exit_code)
"""


def test_train_inside_of_two_ranks(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(CALLBACK)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = repr({**given, "deepspeed_config": "ds.json"})
    done = run_ranks(["program.py", words], 2, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [STOPPED, STOPPED], done[0].stdout + done[1].stdout
    assert "row 4" in done[0].stdout
    assert [row["event"] for row in api.read_run("run").events if row["event"] == "early"] == ["early"]
    wrong = run_ranks(["program.py", words.replace("'train_steps': 6", "'train_steps': 6, 'seed': -1")], 2,
                      cwd=tmp_path)
    assert "--seed: found -1; expected at least 0." in wrong[0].stdout + wrong[1].stdout


def test_the_notebook_trains_draws_and_generates(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "pretrain/pages/python.ipynb", 4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    code = ("import nbformat, sys; from nbclient import NotebookClient\n"
            "book = nbformat.read(sys.argv[1], 4)\n"
            "NotebookClient(book, timeout=600, kernel_name='python3').execute()\n"
            "print([output.get('text', '') or list(output.get('data', {})) for cell in book.cells "
            "for output in cell.get('outputs', [])])")
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / "pretrain/pages/python.ipynb")], cwd=tmp_path,
                          env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "--train_steps: found -5; expected at least 1." in done.stdout
    assert "image/png" in done.stdout
    assert " the " in done.stdout[done.stdout.index("image/png"):]
    assert nbclient is not None
