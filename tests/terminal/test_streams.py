"""Output that cannot be written ends no program: a closed pipe, a full disk, a stream that was closed at the start.

And text of foreign files sends no controls to the terminal.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import PROGRAM, ROOT
from tests.terminal.test_screen import environment, in_terminal
from tests.test_train import _flags, start_one_rank

_CODE = """
import sys
from pretrain.terminal import ignore_lost_output
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
    return subprocess.run(["bash", "-c", f'set -o pipefail; "$0" -c "$1" {redirections}', sys.executable, _CODE],
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


# ---- text of other people's files

HOSTILE = "<\x1b]0;title\x07\x1b[2J\x9b31m\r\b\x7f\x0b\u202e\u2066\u2028>"  # title, clear, colour, overwrite, reverse

ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
OURS = re.compile(r"\x1b\[(\?25[lh]|2K|1A|K|[\d;]*m)|\r")  # of progress bars and tables


def _hostile(value: Any) -> Any:
    """Add HOSTILE to each text in a JSON value, and a key to each object."""
    if isinstance(value, dict):
        return {**{key: _hostile(each) for key, each in value.items()}, HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [_hostile(each) for each in value]
    return value + HOSTILE if isinstance(value, str) else value


def _make_hostile(run: Path) -> None:
    for path in [*run.glob("*.jsonl"), run / "run.json", *run.rglob("manifest.json")]:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(json.dumps(_hostile(json.loads(line))) + "\n" for line in lines))


@pytest.fixture(scope="module")
def foreign(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two copies of a run: `run`, whose files are hostile, and one whose name is hostile, too."""
    folder = tmp_path_factory.mktemp("foreign")
    done = start_one_rank(_flags(corpus, folder / "run", "--train_steps", "2",
                                 config=ROOT / "ds_configs" / "zero1_bf16.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    _make_hostile(folder / "run")
    shutil.copytree(folder / "run", folder / f"run{HOSTILE}")
    (folder / "run" / "checkpoints" / f"global_step1{HOSTILE}").mkdir()
    (folder / "config.json").write_text(json.dumps({HOSTILE: 1, "train_batch_size": HOSTILE}))
    (folder / "text.jsonl").write_text(json.dumps({"text": f"a {HOSTILE} b" * 20}) + "\n")
    return folder


@pytest.mark.parametrize("command", [
    "summary {named}", "checkpoint list {run}", "checkpoint list {named}", "checkpoint verify {run}",
    "export {named} --output {folder}/out", "check --deepspeed_config {folder}/config.json",
    "summary {folder}/none{hostile}"])
def test_text_of_foreign_files_sends_nothing_to_the_terminal(command: str, foreign: Path) -> None:
    check_output(command, foreign)


def check_output(command: str, foreign: Path) -> str:
    """Check that the output of a subcommand has no controls, in a terminal and without. Returns it."""
    names = {"run": str(foreign / "run"), "named": f"{foreign}/run{HOSTILE}", "folder": str(foreign),
             "hostile": HOSTILE}
    program = [sys.executable, PROGRAM, *(word.format(**names) for word in command.split())]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
    piped = done.stdout.decode()
    _, watched = in_terminal(program)
    for output in (piped, OURS.sub("", watched)):
        assert output.strip()
        assert "Traceback" not in output
        assert not ACTING.search(output), output
    return piped
