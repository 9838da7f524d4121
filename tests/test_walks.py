"""The files through which one follows a save and a resume: those that these execute are those that the page draws."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.callback import Callback, UpdatePart
from tests.support.cases import config, flags
from tests.support.launch import ROOT

MOST_FILES = {"save": 10, "resume": 18}  # that one opens to follow each; these numbers only go down
_PROGRAM = """
import json, sys, threading
from pretrain import train, trainer
from pretrain.step_loop import StepLoop

files, save, begin_loop = set(), StepLoop._save, trainer._begin_loop

def note(frame, event, argument):
    if event == "call":
        files.add(frame.f_code.co_filename)

def watch(function):
    sys.setprofile(function)
    threading.setprofile(function)

def noted_save(*args, **kwargs):
    watch(note)
    try:
        return save(*args, **kwargs)
    finally:
        watch(None)

def not_noted(*args, **kwargs):
    watch(None)
    return begin_loop(*args, **kwargs)

if sys.argv[1] == "save":
    StepLoop._save = noted_save
else:  # until the state is loaded
    trainer._begin_loop = not_noted
    watch(note)
code = train.main(sys.argv[2:])
print("FILES", json.dumps(sorted(files)))
"""


@pytest.fixture(scope="module")
def executed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the files below pretrain/ that a save executes, and those of a resume in another layout."""
    folder, found = tmp_path_factory.mktemp("walks"), {}
    given: dict[str, Any] = {**flags(corpus, layers=1, hidden=32, steps=3), "save": "run", "save_interval": 1}
    for walk, stage in (("save", 1), ("resume", 3)):
        (folder / f"{walk}.json").write_text(json.dumps(config(stage, micro=2)))
        of_walk = {**given, "deepspeed_config": f"{walk}.json", **({"exit_step": 2} if walk == "save" else {})}
        done = subprocess.run([sys.executable, "-c", _PROGRAM, walk, *(f"--{key}={value}"
                                                                       for key, value in of_walk.items())],
                              cwd=folder, capture_output=True, text=True, check=True)
        files = map(Path, json.loads(done.stdout.split("FILES")[1]))
        found[walk] = {str(file.relative_to(ROOT / "pretrain")) for file in files
                       if file.is_relative_to(ROOT / "pretrain")}
    return found


def _drawn(title: str) -> set[str]:
    """Return the files in a drawing of the page."""
    (drawing,) = re.findall(rf"## {title}\n.*?```log\n(.*?)```", (ROOT / "pretrain/README.md").read_text(), re.DOTALL)
    folder, drawn = "", set()
    for line in drawing.splitlines():
        if line.endswith("/"):
            folder = line
        elif names := re.match(r" *((?:\w+\.py,? )*\w+\.py):", line):
            drawn |= {folder + name for name in names[1].replace(",", "").split()}
    return drawn


@pytest.mark.parametrize(("walk", "title", "entry"), [("save", "A save", "step_loop.py"),
                                                      ("resume", "A resume in another layout", "trainer.py")])
def test_the_files_of_a_walk_are_those_that_the_page_draws(walk: str, title: str, entry: str,
                                                           executed: dict[str, set[str]]) -> None:
    walked = {file for file in executed[walk] if file.startswith("checkpoint/")} | {entry}
    assert walked == _drawn(title)
    assert len(walked) <= MOST_FILES[walk]


def _parts() -> list[str]:
    """Return rows of the page's table: each part of a run, and the points of callback.py that it has."""
    points = [name for kind in (UpdatePart, Callback) for name in vars(kind)
              if inspect.isfunction(vars(kind)[name]) and not name.startswith("_") and name != "set_state"]
    found = []
    for path in sorted((ROOT / "pretrain").glob("*/**/*.py")):
        file = path.relative_to(ROOT / "pretrain")
        for name in re.findall(r"^class (\w+)\((?:Callback|UpdatePart)\)", path.read_text(), re.MULTILINE):
            part = getattr(importlib.import_module(".".join(["pretrain", *file.with_suffix("").parts])), name)
            acts = [point for point in points
                    if getattr(part, point, None) not in (None, *(getattr(kind, point, None)
                                                                  for kind in (UpdatePart, Callback)))]
            found.append((part.order, f"| {part.order:g} | `{name}` | `{file}` | {', '.join(acts)} |"))
    return [row for _, row in sorted(found)]


def test_the_page_lists_who_acts_at_which_point() -> None:
    """Rows of an extension that was deleted may remain."""
    page = (ROOT / "pretrain/README.md").read_text()
    listed = [line for line in page.splitlines() if re.match(r"\| [\d.]+ \| `\w+` \| `", line)]
    kept = [line for line in listed if (ROOT / "pretrain" / line.split("`")[3]).exists()]
    assert kept == _parts(), "\n".join(["the table is:", *_parts()])
