"""tests/pythons.sh with the Python of the environment and one other, if this machine has another one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT


@pytest.mark.slow  # continuous integration runs the other tests with each Python
def test_two_pythons_read_the_checkpoints_of_each_other() -> None:
    done = subprocess.run(["tests/pythons.sh", "--two"], cwd=ROOT, capture_output=True, text=True, timeout=3600,
                          env={**os.environ, "VENV": str(Path(sys.executable).parents[1])})
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    if "nothing to test" in done.stderr:
        pytest.skip("this machine has no second Python")
