"""Start launch/supervise.py as a process, and wait for its progress."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pretrain.monitor.read_run_folder import read_rows
from tests.support.launch import LIMIT_S, ROOT


def supervise(words: list[str], *, environ: dict[str, str] | None = None, **settings: Any) -> subprocess.Popen[str]:
    """Start `launch/supervise.py WORDS` with short pauses between restarts."""
    scripts = str(Path(sys.executable).parent)
    environ = environ or {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
                          "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen([sys.executable, str(ROOT / "launch" / "supervise.py"), "--backoff_s", "0.1", *words],
                            env=environ, text=True, start_new_session=True, **settings)


def wait_for_end(process: subprocess.Popen[str], timeout: float = LIMIT_S) -> tuple[int, str]:
    """Wait until the supervisor exits. Returns (exit code, stderr). Kills the supervisor after the time-out."""
    try:
        stderr = process.communicate(timeout=timeout)[1]
    except subprocess.TimeoutExpired:
        kill_tree(process)
        raise
    return process.returncode, stderr or ""


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kill the process and all its descendants, if the process is still running."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], describe: Callable[[], object] = lambda: "", *,
               poll_s: float = 0.05) -> None:
    """Wait until `condition()` is true. Fails with `describe()` after the time-out."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"the condition is not true after {LIMIT_S} s: {describe()}"
        time.sleep(poll_s)


def flag_pairs(words: list[str]) -> list[tuple[str, str]]:
    """Return (flag, value) pairs of a command line in which every flag has a value."""
    return list(zip(words[::2], words[1::2], strict=True))


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the training rows of metrics.jsonl, without an incomplete last line."""
    return [row for row in read_rows(run / "metrics.jsonl") if "loss" in row]


def read_restart_log(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (rows of starts, summary rows) of RUN/restarts.jsonl. Both are empty if there is no such file."""
    log = read_rows(run / "restarts.jsonl")
    return [row for row in log if "start" in row], [row for row in log if "summary" in row]


def wait_for_rows(launcher: subprocess.Popen[Any], run: Path, number: int) -> None:
    """Wait until metrics.jsonl has `number` training rows. Fails if the launcher exits, or after the time-out."""
    wait_until(lambda: len(rows(run)) >= number or launcher.poll() is not None, lambda: rows(run))
    assert launcher.poll() is None, f"the launcher has ended: {launcher.communicate()[0]}"
