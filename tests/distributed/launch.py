"""Start real ranks on this machine: gloo, one process a rank, one thread a process."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher would set for one of `ranks` processes on this host."""
    scripts = str(Path(sys.executable).parent)  # this environment's ninja first: another one would rebuild everything
    return {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]]), "RANK": str(rank),
            "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


def run_ranks(command: list[str], ranks: int, *, cwd: Path, timeout: float = 600,
              environ: dict[str, str] | None = None) -> list[subprocess.CompletedProcess[str]]:
    """Run `python COMMAND` on every rank to its end. When one fails the others are ended: they would wait for it."""
    port = free_port()
    logs = [open(cwd / f"rank{rank}.log", "w+", encoding="utf-8") for rank in range(ranks)]  # noqa: SIM115
    processes = [subprocess.Popen([sys.executable, *command], cwd=cwd, stdout=logs[rank], stderr=subprocess.STDOUT,
                                  env={**rank_environment(rank, ranks, port), **(environ or {})})
                 for rank in range(ranks)]
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                time.sleep(2)  # let the others report too
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{command} ran for more than {timeout} s\n" + _tails(cwd, ranks))
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    done = []
    for process, log in zip(processes, logs, strict=True):
        log.seek(0)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, stdout=log.read()))
        log.close()
    return done


def _tails(folder: Path, ranks: int) -> str:
    return "\n".join(f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-4000:]}" for rank in range(ranks))


def run_cases(cases: list[dict[str, Any]], ranks: int, folder: Path, **settings: Any) -> dict[str, Any]:
    """Run `worker.py` over `cases` in one launch; each case's result by its name, as rank 0 reports it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_ranks([str(Path(__file__).with_name("worker.py")), "cases.json", "results.json"], ranks, cwd=folder,
                     **settings)
    assert all(process.returncode == 0 for process in done), _tails(folder, ranks)
    return dict(json.loads((folder / "results.json").read_text()))


def run_forked(cases: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run `forked.py` over `cases`, one after another, in `folder`; what it reports of each, by name."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with open(folder / "log", "w", encoding="utf-8") as log:
        done = subprocess.run([sys.executable, "-m", "tests.distributed.forked", "cases.json", "results.json"],
                              cwd=folder, env=rank_environment(0, 1, 0), stdout=log, stderr=subprocess.STDOUT,
                              timeout=3000, check=False)
    print((folder / "log").read_text())
    assert done.returncode == 0, "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}"
                                           for path in sorted(folder.glob("*log")))
    return dict(json.loads((folder / "results.json").read_text()))
