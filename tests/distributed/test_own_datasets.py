"""Runs on a dataset of the user's own code: equal losses in every layout, and no code from the record of a run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.monitor.read_run_folder import newest_start, read_metrics
from tests.support.cases import case, config
from tests.support.extensions import entries_of_extensions
from tests.support.launch import ROOT, run_worker, train_ranks
from tests.support.layouts import dp2, pp2, relative_difference

TOLERANCE = 1e-6  # relative, fp32
SAVED, STEPS = 3, 8
MODEL = {"model": "tiny", "model_overrides": "vocab_size=256,n_layer=2,n_embd=64", "seq_length": 32}
PAGE = ROOT / "pretrain/pages/training_data.md"


def flags() -> dict[str, Any]:
    return {**MODEL, "train_steps": STEPS, "eval_steps": 1, "dataset_module": "own_data:build",
            "dataset_args": '{"positions": true}', "document_attention": True}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    shutil.copy(ROOT / "tests" / "support" / "own_data.py", folder / "own_data.py")
    cases = [case(name, "run", values, flags(), first=0, saved=SAVED)
             for name, values in (("zero1", dp2(1)), ("pipeline", pp2(1)))]
    cases.append(case("zero1-pipeline", "run", pp2(1), flags(), first=SAVED,
                      source=f"run-zero1/checkpoints/global_step{SAVED}"))
    return run_worker("blend_worker.py", cases, 2, folder)


def test_losses_and_samples_are_equal_in_every_layout_and_after_a_resume(results: dict[str, Any]) -> None:
    """The items have two documents of 2 to 16 tokens with positions, and weights of 0, 0.25, 1 and 3. 8 steps are 1.6
    epochs.
    """
    expected = results["zero1"]
    for name, first in (("pipeline", 0), ("zero1-pipeline", SAVED)):
        assert results[name]["samples"] == expected["samples"][first:], name
        assert relative_difference(results[name]["loss"], expected["loss"][first:]) <= TOLERANCE, name
        assert relative_difference([results[name]["valid"]["valid"]], [expected["valid"]["valid"]]) <= TOLERANCE, name


def words(folder: Path, micro: int, save: str, module: str = "my_data:build", **changes: Any) -> list[str]:
    (folder / f"{micro}.json").write_text(json.dumps(config(1, micro=micro, accumulation=1)))
    values = {**MODEL, "model_overrides": "vocab_size=258,n_layer=2,n_embd=64", "seq_length": 256,
              "train_steps": 6, "save_interval": 2, "eval_steps": 1, "log_interval": 1, "tokenizer": "bytes",
              "deepspeed_config": f"{micro}.json", "dataset_module": module, "save": save, **changes}
    return [f"--{name}={value}" for name, value in values.items()]


def losses_of(run: Path) -> list[float]:
    rows = {row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row}
    return [rows[step] for step in range(1, 7)]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example of the page, and a run of it on two ranks."""
    folder = tmp_path_factory.mktemp("example")
    found = re.search(r"```python\n(# my_data\.py.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    (folder / "my_data.py").write_text(found[1])
    done = train_ranks(2, words(folder, 2, "run"), folder)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    return folder


def test_the_example_of_the_page_resumes_after_a_kill_and_on_another_number_of_ranks(example: Path) -> None:
    """A rank kills itself while it reads step 5. The resume gives the same bits, and one rank the same losses."""
    (example / "killed.py").write_text(
        "import os, my_data\n"
        "class Killed(my_data.Tables):\n"
        "    reads = 0\n"
        "    def __getitem__(self, index):\n"
        "        Killed.reads += 1\n"
        "        if Killed.reads > 9 + 2 * 4: os.kill(os.getpid(), 9)\n"
        "        return super().__getitem__(index)\n"
        "def build(split, seq_length):\n"
        "    return Killed(range(2, 500)) if split == 'train' else None\n")
    killed = train_ranks(2, words(example, 2, "resumed", "killed:build"), example)
    assert {rank.returncode for rank in killed} & {-9, 137}, killed[0].stdout
    assert (example / "resumed" / "checkpoints" / "global_step2").exists()
    done = train_ranks(2, words(example, 2, "resumed"), example)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    assert "global_step" in done[0].stdout
    assert losses_of(example / "resumed") == losses_of(example / "run")
    last = [read_manifest(example / run / "checkpoints" / "global_step6") for run in ("run", "resumed")]
    assert last[0].data_fingerprint == last[1].data_fingerprint
    assert last[0].data == {"items": 498, "own_fingerprint": "tables range(2, 500)"}

    done = train_ranks(1, words(example, 4, "alone"), example)
    assert done[0].returncode == 0, done[0].stdout
    assert relative_difference(losses_of(example / "alone"), losses_of(example / "run")) <= 1e-5

    other = train_ranks(2, words(example, 2, "resumed", dataset_args='{"largest": 400}', train_steps=8), example)
    assert [rank.returncode for rank in other] == [2, 2]
    assert "--dataset_module my_data:build: this is not the data" in other[0].stdout
    assert "498 items there, 398 items here" in other[0].stdout


COMMANDS = {  # words -> whether the command succeeds without the data of the run
    ("summary", "RUN"): True, ("checkpoint", "list", "RUN"): True, ("checkpoint", "verify", "RUN"): True,
    ("evaluate", "RUN"): False, ("evaluate", "RUN", "--split", "train"): False,
    ("check", "--device", "cpu", "--deepspeed_config", "2.json", "--resume_from", "RUN", "--save", "new",
     "--train_steps", "6"): False,
    ("export", "RUN", "--output", "hf"): True,
    **entries_of_extensions("foreign_files", "WITHOUT_DATA"),
}


# Runs all commands in one process, which imports torch once.
_ALL_COMMANDS = """
import contextlib, io, json, sys
from pretrain.__main__ import program
for words in json.loads(sys.argv[1]):
    sys.argv, output, code = ["ds-pretrain", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            program()
        except SystemExit as end:
            code = end.code or 0
    with open("results.jsonl", "a") as file:
        file.write(json.dumps([code, output.getvalue()]) + "\\n")
"""


def test_no_tool_imports_a_module_that_the_record_of_a_run_names(example: Path) -> None:
    """A hostile run folder: run.json and the manifest name a module that lies in the current folder."""
    run = example / "hostile"
    shutil.copytree(example / "run", run)
    (example / "evil.py").write_text("open('imported', 'w').close()\ndef build(*_, **__): pass\n")
    starts = json.loads((run / "run.json").read_text())
    assert newest_start(example / "run")["flags"]["dataset_module"] == "my_data:build"
    for start in starts:
        start["flags"]["dataset_module"] = "evil:build"
    (run / "run.json").write_text(json.dumps(starts))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    named = [[str(run) if word == "RUN" else word for word in command] for command in COMMANDS]
    done = subprocess.run([sys.executable, "-c", _ALL_COMMANDS, json.dumps(named)], cwd=example, capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (example / "results.jsonl").read_text().splitlines()]
    for (command, succeeds), (code, output) in zip(COMMANDS.items(), results, strict=True):
        assert code == (0 if succeeds else 2), (command, output)
        if not succeeds and command[0] != "check":
            assert "code (--dataset_module evil:build), which is not imported because a record names it" in output
        if "--command" in command:
            assert "# Data: --dataset_module evil:build, your own code: run this script in its folder" in output
            assert '--dataset_module "${2:?' in output
            assert "evil" not in "".join(line for line in output.splitlines() if not line.startswith("# "))
    assert not (example / "imported").exists()
    subprocess.run([sys.executable, "-c", "import evil"], cwd=example, check=True)
    assert (example / "imported").exists(), "the module reports its import"
