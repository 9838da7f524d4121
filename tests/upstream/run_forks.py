"""Run the reproducers of DeepSpeed's defects as forks of a process that has imported DeepSpeed."""

import contextlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

LIMIT_S = 600  # of one script, which takes seconds, and minutes if it compiles an operator
CORRECT, DEFECTIVE, CANNOT_RUN = 0, 1, 77  # exit codes of the scripts
FAILED = 70  # exit code of a script that ends with an exception


def run_forks() -> None:
    """Run scripts as forks of this process. sys.argv: folder for their output and exit codes, scripts."""
    import deepspeed

    from pretrain.engine.operator_cache import cache_operators

    cache_operators()
    folder, scripts = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    codes = _run_all(scripts, folder, at_once=len(os.sched_getaffinity(0)))
    failed = [script for script in scripts if codes[script] not in (CORRECT, DEFECTIVE, CANNOT_RUN)]
    codes |= _run_all(failed, folder, at_once=1)  # another script may have taken the port of one that failed
    (folder / "answer.json").write_text(json.dumps(
        {"deepspeed": deepspeed.__version__, "codes": [codes[script] for script in scripts]}))


def _run_all(scripts: Sequence[Path], folder: Path, *, at_once: int) -> dict[Path, int]:
    """Run scripts, and return their exit codes."""
    running: dict[int, Path] = {}
    codes: dict[Path, int] = {}
    for script in scripts:
        if len(running) == at_once:
            _wait_for_one(running, codes)
        pid = os.fork()
        if pid == 0:
            _run_script(script, folder / script.stem)
        running[pid] = script
    while running:
        _wait_for_one(running, codes)
    return codes


def _wait_for_one(running: dict[int, Path], codes: dict[Path, int]) -> None:
    pid, status = os.wait()
    codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)


def _run_script(script: Path, log: Path) -> NoReturn:
    """Run a script in this process, with its output in a file, and end the process with the script's exit code."""
    code = FAILED
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o666), 1)
        os.dup2(1, 2)
        signal.alarm(LIMIT_S)
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")
        code = CORRECT
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run_forks()
