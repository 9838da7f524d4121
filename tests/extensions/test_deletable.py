"""Each extension is one folder: without it and its tests, all else works. Also a check that the core reaches none."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pretrain.active_extensions import extensions
from pretrain.extension import BUILT_IN, Extension
from tests.support.cases import config, flags
from tests.support.launch import ROOT, run_ranks

NAMES = sorted(path.parent.name for path in ROOT.glob("pretrain/extensions/*/extension.py"))
# a program: `python -m MODULE WORDS` with the package of another tree, in a process that has imported the package
OTHER_TREE = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "pretrain"]:
    del sys.modules[name]
del sys.argv[0]
sys.path[0] = sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# flags with which a run uses an extension that has flags
USED: dict[str, dict[str, Any]] = {
    "fp8": {"fp8": "rowwise"} if find_spec("torchao") else {}, "ladder": {"expected_curve": "ladder.json"},
    "notify": {"notify_command": "true"}, "object_stores": {}, "profile": {"profile_steps": 1},
    "replay": {"recompute_interval": 1}, "sanity": {"sanity_check": "true"}, "tasks": {"show_predictions": 1}}

# words of extensions that are also words of the core, or of DeepSpeed
ORDINARY = {
    "completion", "fp8", "generate", "hint", "models", "new", "notify", "profile", "quickstart", "recomputation"}
# files of the core that may name extensions: deleting the folder leaves them correct
NAMED_IN = {
    "tests/foreign_files/payloads.py",  # hostile texts with keys that would act
    "tests/monitor/test_repeat_command.py",  # secret flags of each extension
    "tests/support/supervised.py",  # starts launch/supervise.py
    "tests/test_quickstart.py"}  # the commands of the guide, which continue the run of its first one


def commands_of(extension: Extension) -> list[str]:
    """Return the subcommands that the core does not have, too."""
    return [name for name, command in extension.commands.items() if not command.replaces]


def words_of(extension: Extension) -> Iterator[str]:
    """Yield patterns of what only the extension has: modules, flags, subcommands, events, metrics and files."""
    yield rf"extensions[./]{extension.name}\b"
    yield from (rf"--{flag}\b|[\"']{flag}[\"'=:]|\b{flag}=" for flag in extension.flags if flag not in ORDINARY)
    yield from (rf"ds-pretrain {name}\b|launch/{name}\.py" for name in commands_of(extension))
    yield from (rf"[\"'/]{re.escape(name)}[\"']" for name in (
        *extension.events, *extension.requests, *extension.files, *extension.metrics) if name not in ORDINARY)


def test_the_core_names_no_extension() -> None:
    """Its modules and tests, without its pages: a row, a case or a word belongs to the folder of the extension."""
    built_in = [each for each in extensions() if each.origin == BUILT_IN]
    of_all = re.compile("|".join(word for each in built_in for word in words_of(each)))
    quoted = "|".join(name for each in built_in for name in commands_of(each) if name not in ORDINARY)
    of_tests = re.compile(rf"[\"']({quoted})[\"' ]")
    found = []
    for file in tracked_files():
        if not file.startswith(("pretrain/", "tests/")) or file.endswith((".md", ".json", ".jsonl", ".csv")) or \
                file.startswith(("pretrain/extensions/", "tests/extensions/")) or file in NAMED_IN:
            continue
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if of_all.search(line) or (file.startswith("tests/") and of_tests.search(line)):
                found.append(f"{file}:{number}: {line.strip()}")
    assert found == []


def tracked_files() -> list[str]:
    """Return the files of the working tree that git does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.split("\n")
    return [file for file in listed if file and (ROOT / file).is_file()]


def tree_without(name: str, folder: Path) -> Path:
    """Return a copy of the tracked files without the folders of the extension."""
    tree, left_out = folder / "tree", (f"pretrain/extensions/{name}/", f"tests/extensions/{name}/")
    for file in (file for file in tracked_files() if not file.startswith(left_out)):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tree / file)
    for cache in (".mypy_cache", ".import_linter_cache"):
        if (ROOT / cache).is_dir():
            shutil.copytree(ROOT / cache, tree / cache)
    return tree


def test_each_folder_declares_an_extension_of_its_name() -> None:
    assert [each.name for each in extensions() if each.origin == BUILT_IN] == NAMES
    assert USED.keys() >= {each.name for each in extensions() if each.origin == BUILT_IN and each.flags}
    assert [name for name in NAMES if not (ROOT / f"pretrain/extensions/{name}/README.md").is_file()] == []


@pytest.fixture(scope="module")
def plain_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two steps of a run that uses the extensions that need no flags."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, flags_of_run(corpus), ROOT)
    return folder


def flags_of_run(corpus: str) -> list[str]:
    given = {"deepspeed_config": "ds.json", **flags(corpus, layers=1, hidden=32, steps=4), "save": "run",
             "save_interval": 2}
    return [f"--{key}={value}" for key, value in given.items()]


def train(folder: Path, words: list[str], tree: Path) -> str:
    """Train up to step 2, or resume, with the code of a tree."""
    (folder / "ds.json").write_text(json.dumps(config(1, micro=2, precision="bf16")))
    return run_in(tree, folder, ["pretrain.train", *words, *(["--exit_step=2"] if tree == ROOT else [])])


def run_in(tree: Path, cwd: Path, words: list[str]) -> str:
    """Run `python -m WORDS` with the package of a tree, in a fork that has imported torch."""
    [done] = run_ranks(["-c", OTHER_TREE, str(tree), *words], 1, cwd=cwd, environ={"PYTHONPATH": str(tree),
                                                                                   "COLUMNS": "80"})
    assert done.returncode == 0, (words, done.stdout[-4000:])
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_without_an_extension(name: str, corpus: str, plain_run: Path, tmp_path: Path) -> None:
    """A run that used it resumes, with a note about its state if it had one. Nothing refers to its modules or flags.

    ruff examines each file alone, so that it would find in the tree what it finds here.
    """
    tree, words = tree_without(name, tmp_path), flags_of_run(corpus)
    used = [f"--{key}={value}" for key, value in USED.get(name, {}).items()]
    if used or (ROOT / f"tests/extensions/{name}/used.py").is_file():  # that writes the files that these flags name
        if (ROOT / f"tests/extensions/{name}/used.py").is_file():
            (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2, precision="bf16")))
            importlib.import_module(f"tests.extensions.{name}.used").write_files(
                tmp_path, [word.replace("ds.json", str(tmp_path / "ds.json")) for word in words])
        train(tmp_path, [*words, *used], ROOT)
    else:
        shutil.copytree(plain_run, tmp_path, dirs_exist_ok=True, symlinks=True)
    resumed = train(tmp_path, words, tree)
    assert "resumed from" in resumed
    [start] = json.loads((tmp_path / "run/run.json").read_text())[:1]
    note = f"the extension {name}, which the run's last start used, is not installed now"
    assert (note in resumed) == (name in start["extensions"])
    run_in(tree, tmp_path, ["pretrain", "check", "--world_size=1", *words])
    shown = run_in(tree, tmp_path, ["pretrain", "train", "--help"])
    assert [flag for flag in USED.get(name, {}) if f"--{flag}" in shown] == []
    assert f"\n{name} (" not in run_in(tree, tmp_path, ["pretrain", "extensions"])
    run_in(tree, tmp_path, ["pretrain", "summary", str(tmp_path / "run")])
    for words in (["-m", "mypy"], ["-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]):
        done = subprocess.run([sys.executable, *words], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
                              check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, (words, done.stdout[-4000:])
