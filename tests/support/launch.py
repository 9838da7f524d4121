"""Start real ranks on this machine: gloo, one process per rank, one thread per process."""

import atexit
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pretrain.cluster.warm_process import start, warm_process
from pretrain.distributed.process import ROOT, free_port

PROGRAM = str(ROOT / "pretrain" / "__main__.py")  # `python PROGRAM SUBCOMMAND` works in any folder
WORKERS = ROOT / "tests" / "distributed" / "workers"
__all__ = ["PROGRAM", "ROOT", "WORKERS", "free_port"]
LIMIT_S = 900.0  # a test that hangs fails after this time
GRACE_S = 60.0  # after one rank has failed, the other ranks have this time to report their errors
LIMIT_OF_CASE_S = 60.0  # a launch of many cases has this time for each, because other programs may use the processors


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment that a launcher would set for one of `ranks` processes on this host."""
    scripts = str(Path(sys.executable).parent)  # first in PATH, because another ninja would rebuild the operators
    return {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]]), "RANK": str(rank),
            "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


@functools.cache
def warm_socket() -> str:
    """Start the process from which ranks are forked, and return its socket. It ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm")
    server = warm_process(f"{folder}/socket", "tests.distributed.workers.preload", cwd=ROOT, stdout=subprocess.DEVNULL,
                          environ=rank_environment(0, 1, 0))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    return f"{folder}/socket"


def run_ranks(command: list[str], ranks: int, *, cwd: Path, timeout: float = LIMIT_S,
              environ: dict[str, str] | None = None) -> list[subprocess.CompletedProcess[str]]:
    """Run `python COMMAND` on every rank and wait for all. When one rank fails, the others are killed after GRACE_S.

    `stdout` of each result has both output streams.
    """
    port, codes, running = free_port(), [0] * ranks, {}
    deadline = time.monotonic() + timeout
    for rank in range(ranks):
        with (cwd / f"rank{rank}.log").open("w") as log, open(os.devnull) as nothing:
            child = start(warm_socket(), command, cwd=str(cwd), files=(nothing.fileno(), log.fileno(), log.fileno()),
                          environ={**rank_environment(rank, ranks, port), **(environ or {})})
            assert child is not None
            running[child] = rank
    is_late = False
    while running:
        for child in select.select([*running], [], [], max(0.0, deadline - time.monotonic()))[0]:
            codes[running.pop(child)] = code = child.wait()
            if code != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if running and time.monotonic() > deadline:
            is_late = is_late or not any(codes)
            for child in running:
                os.kill(child.pid, signal.SIGKILL)
            deadline = time.monotonic() + LIMIT_S
    if is_late:
        raise TimeoutError(f"{command} ran for more than {timeout} s\n" + tails(cwd, ranks))
    return [subprocess.CompletedProcess(command, code, stdout=(cwd / f"rank{rank}.log").read_text())
            for rank, code in enumerate(codes)]


def train_ranks(ranks: int, flags: list[str], cwd: Path,
                **environ: str) -> list[subprocess.CompletedProcess[str]]:
    """Run `pretrain/train.py FLAGS` on every rank, with its output in `cwd`."""
    return run_ranks([str(ROOT / "pretrain" / "train.py"), *flags], ranks, cwd=cwd, environ=environ)


def tails(folder: Path, ranks: int) -> str:
    """Return the end of each rank's output."""
    return "\n".join(f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-4000:]}" for rank in range(ranks))


class FailedCase(dict[str, Any]):
    """Result of a failed case. A test that reads a value from this result fails with the end of the ranks' output."""

    def __missing__(self, key: str) -> Any:
        raise AssertionError(f"the case failed on its ranks:\n{dict(self)}")


def run_worker(worker: str, cases: list[dict[str, Any]], ranks: int, folder: Path, **settings: Any) -> dict[str, Any]:
    """Run `cases` with a program of tests/distributed/workers on `ranks` ranks. Return {case name: result}.

    All cases share one launch. If a case fails, its result is a FailedCase, and the remaining cases get a new launch.
    """
    settings.setdefault("timeout", max(LIMIT_S, LIMIT_OF_CASE_S * len(cases)))
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    while cases:
        (folder / "cases.json").write_text(json.dumps(cases))
        (folder / "results.json").write_text("{}")
        done = run_ranks([str(WORKERS / worker), "cases.json", "results.json"], ranks, cwd=folder, **settings)
        results |= json.loads((folder / "results.json").read_text())
        if all(process.returncode == 0 for process in done):
            break
        failed = next((case["name"] for case in cases if case["name"] not in results), None)
        assert failed is not None, f"the ranks failed after their last case:\n{tails(folder, ranks)}"
        print(f"case {failed} failed:\n{tails(folder, ranks)}")
        results[failed] = FailedCase(output=tails(folder, ranks))
        cases = cases[[case["name"] for case in cases].index(failed) + 1:]
    return results


def run_cases(cases: list[dict[str, Any]], ranks: int, folder: Path, **settings: Any) -> dict[str, Any]:
    """Call `run_worker` with worker.py."""
    return run_worker("worker.py", cases, ranks, folder, **settings)


def run_forked(cases: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Call `run_worker` with forked.py, which starts the ranks of each case itself."""
    return run_worker("forked.py", cases, 1, folder, timeout=3000)
