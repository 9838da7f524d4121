"""Let the programs of this package that a test starts run as forks of a warm process, which has imported torch once.

A module that Python imports at its start, before any other, hands the programs over. Other programs, and starts in
another environment than that of the warm process, are unchanged.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from pretrain.cluster.warm_process import warm_process
from tests.support.hand_over import VARIABLE
from tests.support.launch import ROOT


def hand_over_at_start(packages: Path) -> None:
    """Let each Python of an environment import hand_over.py at its start; `packages`: its site-packages."""
    shutil.copy(ROOT / "tests/support/hand_over.py", packages)
    line = f'import os; "{VARIABLE}" in os.environ and __import__("hand_over").hand_over()'
    (packages / "zz_hand_over.pth").write_text(f"{line}\n")


@contextlib.contextmanager
def warm(folder: Path, environment: Path, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run a warm process in this block. Yields the variables of programs that are to run in its forks.

    `environment`: the virtual environment into which this package is installed.
    """
    path, (program,) = f"{folder}/warm", environment.glob("lib/python*/site-packages/pretrain/child.py")
    command = [f"{environment}/bin/python", str(program), "pretrain.cluster.warm_process"]
    with warm_process(path, environ=environ, command=command, stdout=subprocess.DEVNULL) as server:
        yield {VARIABLE: path}
        server.communicate()  # closes its standard input, which ends it
