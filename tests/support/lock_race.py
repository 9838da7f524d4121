"""Several processes ask for one lease at the same moment, again and again, for tests/resilience/test_run_lock.py.

    python -m tests.support.lock_race FOLDER ROUNDS PROCESSES

Each round uses a new folder whose lock is absent, released, or stale in one of several ways. Prints a JSON object: kind
of lock -> numbers of winners in the rounds of this kind.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.resilience.lease_file import LeaseFile, Owner
from pretrain.resilience.run_lock import LOCK, RunLock
from tests.support.lock_process import scale_time

DEAD_PID = 2**22 + 1  # above the largest pid_max of Linux
_LIMIT_S = 60  # a race that goes wrong fails
_CONTEXT = multiprocessing.get_context("fork")
ANOTHER_HOST = replace(Owner(), host="node7", boot_id="another boot", pid=4711)


def write_lease(path: Path, owner: Owner, *, age_s: float = 0.0, rest: str = "") -> None:
    """Write the file of a lease, with a heartbeat of `age_s` seconds ago (negative: in the future)."""
    path.write_text(json.dumps(asdict(owner)) + "\n" + rest)
    beat_ns = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(beat_ns, beat_ns))


def _prepare(run: Path, kind: str) -> None:
    run.mkdir(parents=True)
    dead, lock = replace(Owner(), pid=DEAD_PID), run / LOCK
    if kind == "released":
        write_lease(lock, dead, rest='{"released": 0}\n')
    elif kind == "dead":
        write_lease(lock, dead)
    elif kind == "another host":
        write_lease(lock, ANOTHER_HOST, age_s=100)
    elif kind == "killed while taking over":  # a lease with a successor whose owner was killed before its rename
        write_lease(lock, dead)
        write_lease(run / f"{LOCK}.{dead.token}", replace(dead, token="b" * 16))
    elif kind == "unreadable":
        lock.touch()
        os.utime(lock, (0, 0))


def _contend(run: Path, start: Any, finish: Any) -> None:
    for name in ("create", "take_over"):
        setattr(LeaseFile, name, _after_all(getattr(LeaseFile, name), start))
    code = 0
    try:
        RunLock(run, report=lambda line: None)
    except ConfigError:
        code = 2
    finish.wait(_LIMIT_S)
    os._exit(code)  # without a release


def _after_all(method: Callable[..., bool], start: Any) -> Callable[..., bool]:
    """Return the method, whose first call waits until all processes have seen the same lock and want to take it."""
    waited: list[bool] = []

    def wait_then_call(*args: Any) -> bool:
        if not waited:
            waited.append(True)
            start.wait(_LIMIT_S)
        return method(*args)

    return wait_then_call


def race(run: Path, kind: str, processes: int) -> int:
    """Return the number of processes that hold the lock at once."""
    _prepare(run, kind)
    start, finish = _CONTEXT.Barrier(processes), _CONTEXT.Barrier(processes)
    contenders = [_CONTEXT.Process(target=_contend, args=(run, start, finish))
                  for _ in range(processes)]
    for each in contenders:
        each.start()
    for each in contenders:
        each.join()
    return [each.exitcode for each in contenders].count(0)


KINDS = ("absent", "released", "dead", "another host", "killed while taking over", "unreadable")

if __name__ == "__main__":
    scale_time(1.0)
    base, rounds, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({kind: [race(base / f"{kind} {number}", kind, processes) for number in range(rounds)]
                      for kind in KINDS}))
