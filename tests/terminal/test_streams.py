"""Output that cannot be written ends no program: a closed pipe, a full disk, a stream that was closed at the start."""

import subprocess
import sys

import pytest

from tests.support.launch import ROOT

PROGRAM = """
import sys
from pretrain.terminal.streams import ignore_lost_output
before = sys.stdout
ignore_lost_output()
streams = sys.stdout, sys.stderr
ignore_lost_output()
assert (sys.stdout, sys.stderr) == streams and sys.stdout is not before
for number in range(20000):
    print("a line of the log", number, flush=number % 7 == 0)
print("to stderr", file=sys.stderr)
"""


def run(redirections: str) -> subprocess.CompletedProcess[str]:
    """Run the program under a shell that redirects its output."""
    return subprocess.run(["bash", "-c", f'set -o pipefail; "$0" -c "$1" {redirections}', sys.executable, PROGRAM],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_output_that_can_be_written_is_complete() -> None:
    done = run("")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"a line of the log {number}" for number in range(20000)]
    assert done.stderr == "to stderr\n"


@pytest.mark.parametrize(("redirections", "problem"), [("> /dev/full", "No space left on device"),
                                                       ("| head -n 1", "Broken pipe"), (">&-", "")])
def test_lost_output_is_one_warning(redirections: str, problem: str) -> None:
    done = run(redirections)
    assert done.returncode == 0, done.stderr
    warnings = [f"warning: the output cannot be written ({problem}); the run continues without it"] if problem else []
    assert done.stderr.splitlines() == [*warnings, "to stderr"]


@pytest.mark.parametrize("redirections", ["2> /dev/full", "2>&-", ">&- 2>&-", "> /dev/full 2>&1"])
def test_lost_warnings_end_no_program(redirections: str) -> None:
    assert run(redirections).returncode == 0
