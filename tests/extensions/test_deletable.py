"""Each extension is one folder: without it and its tests, all else works. Also a check that the core reaches none."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.active_extensions import extensions
from pretrain.extension import BUILT_IN
from tests.support.cases import config, flags
from tests.support.launch import ROOT

NAMES = sorted(path.parent.name for path in ROOT.glob("pretrain/extensions/*/extension.py"))
# flags with which a run uses an extension that has flags
USED: dict[str, dict[str, Any]] = {
    "ladder": {"expected_curve": "ladder.json"}, "notify": {"notify_command": "true"}, "object_stores": {},
    "profile": {"profile_steps": 1},
    "replay": {"recompute_interval": 1}, "sanity": {"sanity_check": "true"}, "tasks": {"show_predictions": 1}}


def tree_without(name: str, folder: Path) -> Path:
    """Return a copy of the tracked files without the folders of the extension."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split("\n")
    tree, left_out = folder / "tree", (f"pretrain/extensions/{name}/", f"tests/extensions/{name}/")
    for file in (file for file in files if file and not file.startswith(left_out) and (ROOT / file).is_file()):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tree / file)
    for cache in (".mypy_cache", ".ruff_cache"):
        if (ROOT / cache).is_dir():
            shutil.copytree(ROOT / cache, tree / cache)
    return tree


def test_each_folder_declares_an_extension_of_its_name() -> None:
    assert [each.name for each in extensions() if each.origin == BUILT_IN] == NAMES
    assert USED.keys() == {each.name for each in extensions() if each.origin == BUILT_IN and each.flags}
    assert [name for name in NAMES if not (ROOT / f"pretrain/extensions/{name}/README.md").is_file()] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_without_an_extension(name: str, corpus: str, tmp_path: Path) -> None:
    """A run that used it resumes, with a note about its state if it had one. Nothing refers to its modules or flags."""
    tree = tree_without(name, tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "80"}

    def run(*words: str, code: str = str(tree), cwd: Path = tree) -> str:
        done = subprocess.run([sys.executable, *words], cwd=cwd, env={**environ, "PYTHONPATH": code}, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, (words, done.stdout[-4000:])
        return done.stdout

    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    given = {"deepspeed_config": "ds.json", **flags(corpus, layers=1, hidden=32, steps=4), "save": "run",
             "save_interval": 2}
    words = [f"--{key}={value}" for key, value in given.items()]
    used = [f"--{key}={value}" for key, value in USED.get(name, {}).items()]
    if (ROOT / f"tests/extensions/{name}/used.py").is_file():  # the files that these flags name
        importlib.import_module(f"tests.extensions.{name}.used").write_files(
            tmp_path, [word.replace("ds.json", str(tmp_path / "ds.json")) for word in words])
    run("-m", "pretrain.train", *words, *used, "--exit_step=2", code=str(ROOT), cwd=tmp_path)
    resumed = run("-m", "pretrain.train", *words, cwd=tmp_path)
    assert "resumed from" in resumed
    [start] = json.loads((tmp_path / "run/run.json").read_text())[:1]
    note = f"the extension {name}, which the run's last start used, is not installed now"
    assert (note in resumed) == (name in start["extensions"])
    run("-m", "pretrain", "check", "--world_size=1", *words, cwd=tmp_path)
    shown = run("-m", "pretrain", "train", "--help")
    assert [flag for flag in USED.get(name, {}) if f"--{flag}" in shown] == []
    assert f"\n{name} (" not in run("-m", "pretrain", "extensions")
    run("-m", "pretrain", "summary", str(tmp_path / "run"))
    run("-m", "ruff", "check", "-q", ".")
    run("-m", "mypy")
    run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
