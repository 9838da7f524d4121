"""Start real ranks on this machine: gloo, one process a rank, one thread a process."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pretrain.distributed.process import ROOT, free_port

WORKERS = ROOT / "tests" / "distributed" / "workers"
__all__ = ["ROOT", "WORKERS", "free_port"]  # for those who start ranks
LIMIT_S = 900.0  # ends a test that hangs; nothing else depends on it


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher would set for one of `ranks` processes on this host."""
    scripts = str(Path(sys.executable).parent)  # this environment's ninja first: another one would rebuild everything
    return {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]]), "RANK": str(rank),
            "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


@functools.cache
def fork_server() -> subprocess.Popen[str]:
    """The process that ranks are forks of; it ends with this one."""
    server = subprocess.Popen([sys.executable, "-m", "tests.distributed.workers.fork_server"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, cwd=ROOT, env=rank_environment(0, 1, 0))
    atexit.register(server.kill)
    return server


def run_ranks(command: list[str], ranks: int, *, cwd: Path, timeout: float = LIMIT_S,
              environ: dict[str, str] | None = None) -> list[subprocess.CompletedProcess[str]]:
    """Run `python COMMAND` on every rank to its end. When one fails the others are ended: they would wait for it.

    `stdout` of each has both of its streams.
    """
    port, server = free_port(), fork_server()
    environs = [{**rank_environment(rank, ranks, port), **(environ or {})} for rank in range(ranks)]
    request = {"command": command, "environs": environs, "cwd": str(cwd), "timeout": timeout}
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    if "timeout" in answer:
        raise TimeoutError(f"{command} ran for more than {timeout} s\n" + _tails(cwd, ranks))
    return [subprocess.CompletedProcess(command, code, stdout=(cwd / f"rank{rank}.log").read_text())
            for rank, code in enumerate(answer["codes"])]


def train_ranks(ranks: int, flags: list[str], cwd: Path,
                **environ: str) -> list[subprocess.CompletedProcess[str]]:
    """Run `pretrain/train.py FLAGS` on every rank, with its output in `cwd`."""
    return run_ranks([str(ROOT / "pretrain" / "train.py"), *flags], ranks, cwd=cwd, environ=environ)


def _tails(folder: Path, ranks: int) -> str:
    return "\n".join(f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-4000:]}" for rank in range(ranks))


def run_cases(cases: list[dict[str, Any]], ranks: int, folder: Path, **settings: Any) -> dict[str, Any]:
    """Run `worker.py` over `cases` in one launch; each case's result by its name, as rank 0 reports it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_ranks([str(WORKERS / "worker.py"), "cases.json", "results.json"], ranks, cwd=folder,
                     **settings)
    assert all(process.returncode == 0 for process in done), _tails(folder, ranks)
    return dict(json.loads((folder / "results.json").read_text()))


def run_forked(cases: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run `forked.py` over `cases`, one after another, in `folder`; what it reports of each, by name."""
    (folder / "cases.json").write_text(json.dumps(cases))
    (done,) = run_ranks([str(WORKERS / "forked.py"), "cases.json", "results.json"], 1, cwd=folder,
                        timeout=3000)
    print(done.stdout)
    assert done.returncode == 0, "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}"
                                           for path in sorted(folder.glob("*log")))
    return dict(json.loads((folder / "results.json").read_text()))
