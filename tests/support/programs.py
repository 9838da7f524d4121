"""Run programs of this repository in a folder, each in a process of its own or several in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.launch import ROOT

_IN_ONE_PROCESS = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code
"""


def run_program(folder: Path, *words: str) -> str:
    """Run `python WORDS` and return its output."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_programs(folder: Path, programs: list[list[str]]) -> None:
    """Run programs one after the other in one process, which imports torch once."""
    run_program(folder, "-c", _IN_ONE_PROCESS, json.dumps(programs))
