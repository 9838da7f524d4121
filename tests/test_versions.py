"""The version matrix of tests/versions.py, and the error about an older Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT
from tests.versions import CELLS, NotHereError, interpreter


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell.name for cell in CELLS])
def test_cell(cell: str, tmp_path: Path) -> None:
    """Each cell reads the checkpoints of this environment, and the other way round."""
    done = subprocess.run([sys.executable, "-m", "tests.versions", "--runs", tmp_path / "runs", "pinned", cell],
                          cwd=ROOT, capture_output=True, text=True, timeout=3 * 3600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    if "| not run: " in done.stdout:
        pytest.skip(done.stdout)


@pytest.mark.parametrize("program", [("-m", "pretrain"), ("pretrain/train.py",), ("tools/evaluate.py",)])
def test_an_older_python_is_rejected_in_one_line(program: tuple[str, ...]) -> None:
    try:
        python = interpreter("3.9")
    except NotHereError as error:
        pytest.skip(str(error))
    done = subprocess.run([python, *program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "this is Python 3.9; Python 3.10 to 3.13 is needed" in done.stderr


def test_the_results_have_a_row_for_each_cell() -> None:
    lines = (ROOT / "pretrain/pages/measurements/versions.csv").read_text().splitlines()
    rows = [line.partition(",")[0] for line in lines if not line.startswith("#")]
    assert rows == ["cell", *(cell.name for cell in CELLS)]
