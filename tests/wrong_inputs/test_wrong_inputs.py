"""Each generated wrong input is rejected with one line and exit code 2, and leaves no file behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pretrain.commands import COMMANDS
from tests.wrong_inputs.case import LEGAL, ROOT, TOOLS, TRAIN, Case, of_extensions
from tests.wrong_inputs.generated import all_cases, cases
from tests.wrong_inputs.world import make_world

CASES = cases()
PROCESSES = (  # one case of each sort, which runs in its own process
    "pretrain/train.py RIGHT --save PATH: proc", "pretrain/train.py RIGHT --model PATH: missing",
    "YAML: b'[[[[[[[[[[[['",
    "pretrain/train.py DeepSpeed JSON: deep", 'metrics.jsonl loss: "x"',
    "checkpoint consolidate {world}/done PATH: proc", "gpt2 vocab_size: 1000000000",
    "checkpoint consolidate {world}/done PATH: under a file", "corpus --megabytes=inf",
    "prepare RIGHT --out PATH: slash",
    *(name for module in of_extensions() for name in getattr(module, "PROCESSES", ())),
)


def _outcomes(*words: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Run all cases in one process that cannot import torch. Return {name of the case: problem}, and the remedies.

    Their files are in memory: each case makes and removes folders.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world, out = Path(folder) / "world", Path(folder) / "out.jsonl"
        world.mkdir()
        subprocess.run([sys.executable, "-m", "tests.wrong_inputs.generated", world, out, *words], cwd=ROOT, check=True,
                       stderr=subprocess.DEVNULL)
        problems = dict(json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
        return problems, json.loads(Path(f"{out}.remedies.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def outcomes() -> tuple[dict[str, str], dict[str, Any]]:
    return _outcomes()


@pytest.fixture(scope="module")
def problems(outcomes: tuple[dict[str, str], dict[str, Any]]) -> dict[str, str]:
    return outcomes[0]


def test_suggested_remedies_do_not_go_round_in_a_circle(outcomes: tuple[dict[str, str], dict[str, Any]]) -> None:
    """What an error suggests is accepted, or leads to another error. One line of each form is tried."""
    _check_remedies(outcomes[1], least_tried=700, least_accepted=500)


@pytest.mark.slow
def test_every_suggested_remedy_is_tried() -> None:
    _check_remedies(_outcomes("", "every")[1], least_tried=2200, least_accepted=1600)


def _check_remedies(remedies: dict[str, Any], *, least_tried: int, least_accepted: int) -> None:
    """Fail for a circle, or if fewer lines than before are understood: all others name nothing that can be applied."""
    assert not remedies["problems"], "\n".join(remedies["problems"])
    counts = remedies["counts"]
    assert counts["understood"] >= 0.6 * counts["lines"] > 1800, (counts, remedies["not_understood"][:50])
    assert counts["tried"] >= least_tried, counts
    assert counts["accepted"] >= least_accepted, counts


@pytest.mark.parametrize("program", sorted({case.program for case in CASES}))
def test_wrong_inputs_are_rejected_in_one_line(problems: dict[str, str], program: str) -> None:
    names = [case.name for case in CASES if case.program == program]
    wrong = [f"{name}: {problems.get(name, 'not run')}" for name in names if problems.get(name, "not run")]
    assert not wrong, f"{len(wrong)} of {len(names)}:\n" + "\n".join(wrong[:20])


def test_there_are_many_cases_and_all_names_in_legal_exist() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 500
    assert {name for excepted in LEGAL.values() for name in excepted} <= {case.name for case in all_cases()}


@pytest.mark.parametrize("name", PROCESSES)
def test_rejection_in_a_separate_process(tmp_path: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    world, here = tmp_path / "world", tmp_path / "here"
    make_world(world)
    here.mkdir()
    _write_files(case, world)
    before = sorted(tmp_path.rglob("*"))
    words = [word.replace("{world}", str(world)) for word in case.words]
    program = [str(ROOT / TRAIN)] if case.program == TRAIN else ["-m", "pretrain", *case.program.split()]
    command = [sys.executable, *program, *words]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, env=_environment(tmp_path), check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("ds-pretrain: error: ")
    assert case.culprit.replace("{world}", str(world)) in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def _write_files(case: Case, world: Path) -> None:
    for file, content in case.files:
        (world / file).parent.mkdir(exist_ok=True)
        (world / file).write_bytes(content)


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "DS_ACCELERATOR": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1"}


def test_every_program_has_cases() -> None:
    assert {program.split(" ")[0] for program in TOOLS} == COMMANDS.keys() - {"train"} | {TRAIN}
