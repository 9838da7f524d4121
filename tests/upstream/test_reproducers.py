"""The reproducers of DeepSpeed's defects find in the installed version what the table of the defects says.

If a row fails, this DeepSpeed has fixed the defect, or has brought it back: enter the version into
`pretrain/engine/patches/apply.py`. A work-around that no supported version needs can be deleted.

Running them all is slow. `tests/versions.sh` does it for each version of DeepSpeed.
"""

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.engine.patches.apply import DEFECTS, find_defect
from tests.support.launch import ROOT
from tests.upstream import reproduce

CAN_BE_MISSING = {"C": "libaio", "J": "MPI"}  # what a reproducer needs besides DeepSpeed and torch
SCRIPTS = sorted(reproduce.FOLDER.glob("[!_]*.py"))


@pytest.mark.slow
def test_the_table_is_right_for_this_version(subtests: pytest.Subtests) -> None:
    for result in reproduce.run_reproducers():
        with subtests.test(result.letter):
            if result.code == reproduce.CANNOT_RUN and CAN_BE_MISSING.get(result.letter, "?") in result.line:
                pytest.skip(result.line)
            exists = find_defect(result.letter).exists_in(result.deepspeed)
            assert result.answer in (["yes"] if exists else ["no", "cannot run"]), result.line


def test_each_defect_has_a_script_that_needs_nothing_else(tmp_path: Path) -> None:
    assert sorted(reproduce.reproducer(defect.letter) for defect in DEFECTS) == SCRIPTS
    for script in SCRIPTS:
        modules = {name.split(".")[0] for node in ast.walk(ast.parse(script.read_text()))
                   for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                                [node.module or ""] if isinstance(node, ast.ImportFrom) else [])}
        assert modules - set(sys.stdlib_module_names) <= {"deepspeed", "torch"}, script
    copy = shutil.copy(reproduce.reproducer("T"), tmp_path)
    done = subprocess.run([sys.executable, copy], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "expected 0, found " in done.stdout.splitlines()[-1], done.stderr
    assert done.returncode == (0 if done.stdout.endswith("found 0\n") else 1)


def test_a_script_without_a_result_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in (("a_raises", "raise ValueError('odd')"), ("b_exits", "print('77'); raise SystemExit(77)")):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(reproduce, "FOLDER", tmp_path)
    failed, missing = reproduce.run_reproducers(["A", "B"])
    assert (failed.answer, failed.line, failed.is_in_table) == ("failed", "ValueError: odd", False)
    assert (missing.answer, missing.is_in_table) == ("cannot run", True)


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "pretrain/engine/patches/README.md").read_text()
    assert reproduce.markdown_table() in page, "paste the output of: python -m tests.upstream.reproduce --table"


def test_each_treatment_exists() -> None:
    for defect in DEFECTS:
        module, _, function = defect.treatment.partition(".")
        if function and "/" not in module and " " not in module:
            assert hasattr(importlib.import_module(f"pretrain.engine.patches.{module}"), function), defect.letter
        for word in defect.treatment.replace(",", " ").split():
            assert not word.endswith(".py") or (ROOT / "pretrain" / word).is_file(), defect.letter
