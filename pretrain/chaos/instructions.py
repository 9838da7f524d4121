"""Instructions for the ranks of a chaos run: files in RUN/chaos, which hooks/sitecustomize.py reads."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.chaos.hooks.sitecustomize import VARIABLE
from pretrain.chaos.schedule import BadStep

_HOOKS = Path(__file__).parent / "hooks"
_ANSWER_S = 20.0  # time in which a rank executes an instruction


def folder_of(run: Path) -> Path:
    """Return the folder with the instructions of a run."""
    return run / "chaos"


def write_bad_steps(run: Path, bad_steps: Sequence[BadStep]) -> None:
    """Write the steps whose loss is NaN. A run reads them at each start."""
    folder_of(run).mkdir(parents=True, exist_ok=True)
    text = json.dumps([[bad.step, bad.rank] for bad in bad_steps])
    (folder_of(run) / "bad_steps.json").write_text(text, encoding="utf-8")


def read_bad_steps(run: Path) -> list[BadStep] | None:
    """Return the bad steps that a run was started with; None if it was started without this tool."""
    try:
        return [BadStep(step, rank) for step, rank in json.loads((folder_of(run) / "bad_steps.json").read_bytes())]
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def hooked_environment(run: Path) -> Iterator[None]:
    """Set the variables with which child processes execute the instructions of this run."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", VARIABLE)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOOKS), before["PYTHONPATH"]]))
    os.environ[VARIABLE] = str(folder_of(run))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cut_link(run: Path, pid: int) -> bool:
    """Ask a rank to shut down its TCP connections. Return whether the rank has done so."""
    request = folder_of(run) / f"cut_link.{pid}"
    request.touch()
    deadline = time.monotonic() + _ANSWER_S
    while request.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    done = not request.exists()
    request.unlink(missing_ok=True)
    return done


def fill_disk(run: Path) -> None:
    """Let the checkpoint writes of all ranks fail with ENOSPC from now on."""
    (folder_of(run) / "disk_full").touch()


def empty_disk(run: Path) -> None:
    """Let checkpoint writes succeed again."""
    (folder_of(run) / "disk_full").unlink(missing_ok=True)
