"""The files through which one follows a save: those that it executes are those that the page draws, and no others."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

from pretrain.callback import Callback, UpdatePart
from tests.support.cases import config, flags
from tests.support.launch import ROOT

MOST_FILES = 10  # that one opens to follow a save; this number only goes down
_PROGRAM = """
import json, sys, threading
from pretrain import trainer
from pretrain.step_loop import StepLoop
from pretrain.train import main

files, save = set(), StepLoop._save

def note(frame, event, argument):
    if event == "call":
        files.add(frame.f_code.co_filename)

def noted(*args, **kwargs):
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        return save(*args, **kwargs)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

StepLoop._save = noted
code = main(sys.argv[1:])
print("FILES", json.dumps(sorted(files)))
"""


def test_a_save_executes_the_files_that_the_page_draws(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    given = {**flags(corpus, layers=1, hidden=32, steps=2), "deepspeed_config": "ds.json", "save": "run",
             "save_interval": 1}
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *(f"--{key}={value}" for key, value in given.items())],
                          cwd=tmp_path, capture_output=True, text=True, check=True)
    executed = {str(Path(file).relative_to(ROOT / "pretrain")) for file in json.loads(done.stdout.split("FILES")[1])
                if Path(file).is_relative_to(ROOT / "pretrain")}
    walked = {file for file in executed if file.startswith("checkpoint/")} | {"step_loop.py"}
    assert len(walked) <= MOST_FILES
    (drawing,) = re.findall(r"## A save\n.*?```log\n(.*?)```", (ROOT / "pretrain/README.md").read_text(), re.DOTALL)
    folder, drawn = "", set()
    for line in drawing.splitlines():
        if line.endswith("/"):
            folder = line
        elif name := re.match(r" *(\w+\.py):", line):
            drawn.add(folder + name[1])
    assert walked == drawn


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
