"""Files of a supervisor in the run folder: its lock, and the log of all starts, which has the goodput.

The supervisor holds RUN/.supervisor.lock with flock(2), and the command that it runs inherits the lock. If the
supervisor is killed, the lock remains until its command has ended, too: the next supervisor waits for this.
RUN/restarts.jsonl has one row for each start of the run, then a summary row.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pretrain.cluster.outcome import RunProgress, read_patiently
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import Goodput, newest_path
from pretrain.resilience.lease_file import Owner, read_lease
from pretrain.resilience.run_lock import find_owner

RESTART_LOG = "restarts.jsonl"
_LOCK = ".supervisor.lock"


class SupervisorLock:
    """The lock of the supervisor of a run folder, which child processes inherit. Raises ConfigError.

    Its file names the supervisor. If that process is dead, but the lock is held, its command still runs.
    """

    def __init__(self, run: Path) -> None:
        path = run / _LOCK
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open until this process ends)
        except OSError as error:
            raise ConfigError("--save", problem=f"the run folder {run} cannot be written: {error.strerror}") from None
        os.set_inheritable(self._file.fileno(), True)
        self.command_runs = not self.acquire()  # the command of a killed supervisor
        earlier = read_patiently(run, lambda: read_lease(path), otherwise=None)
        if self.command_runs and (earlier is None or earlier.owner.runs() is not False):
            raise ConfigError(str(run), problem="another supervisor is already running for this run folder",
                              remedy="wait until it ends, or end it")
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor
            self._file.truncate(0)
            self._file.write(json.dumps(asdict(Owner())) + "\n")
            self._file.flush()

    def acquire(self) -> bool:
        """Return whether this process holds the lock now. A file system without locks counts as if it did."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def rank_0_on_this_host(run: Path) -> list[psutil.Process]:
    """Return the process that holds the lock of the run folder, if it runs on this host."""
    owner = find_owner(run)
    with contextlib.suppress(psutil.Error):
        return [psutil.Process(owner.pid)] if owner is not None and owner.runs() else []
    return []


@dataclass(frozen=True)
class StartRecord:
    """Row of restarts.jsonl: one start of the run and how it ended."""

    time: float  # when the start began, in seconds since 1970
    start: int  # number of the start, from 1
    # The exit code that train.py would have returned. None: the command was not run, because a host was unhealthy or
    # a signal arrived first.
    exit_code: int | None
    reason: str  # why the start ended
    first_step: int  # step from which this start resumed; its first training step is the next one
    last_step: int  # last step that was logged or saved
    kept_step: int  # step of the newest good checkpoint at the end
    productive_seconds: float  # time of the steps up to kept_step; the next start repeats all later steps
    wall_seconds: float
    hosts: list[str]  # hosts of this start; [] if the supervisor has no hostfile
    left_out: dict[str, str] = field(default_factory=dict)  # slow host -> why it was left out (--exclude_stragglers)


class RestartLog:
    """Appends rows to RUN/restarts.jsonl, and computes the goodput of all starts since this object was created."""

    def __init__(self, run: Path) -> None:
        self._path = run / RESTART_LOG
        self._began, self._goodput = time.monotonic(), Goodput(time.time())
        self.starts: list[StartRecord] = []

    def productive_seconds(self, progress: RunProgress) -> float:
        """Return the time of the steps of the last start that were kept: up to the newest checkpoint."""
        goodput = self._goodput
        goodput.return_to(progress.first_step)
        before_s = goodput.kept_seconds
        for row in newest_path(progress.steps):
            goodput.add(row["step"], row["step_time_ms"] / 1e3)
        goodput.return_to(progress.kept_step)
        return goodput.kept_seconds - before_s

    def add(self, record: StartRecord) -> None:
        """Write the row of a start that has ended."""
        self.starts.append(record)
        self._append({**asdict(record), "productive_seconds": round(record.productive_seconds, 3),
                      "wall_seconds": round(record.wall_seconds, 3)})

    def close(self, outcome: str) -> dict[str, Any]:
        """Write and return the summary row. `outcome`: why no further start follows.

        `wall_seconds` of this row includes the pauses between starts.
        """
        kept = self.starts[-1].kept_step if self.starts else 0
        productive, wall = self._goodput.kept_seconds, time.monotonic() - self._began
        row = {"time": time.time(), "summary": outcome, "starts": len(self.starts),
               "first_step": self.starts[0].first_step if self.starts else 0, "last_step": kept,
               "productive_seconds": round(productive, 3), "wall_seconds": round(wall, 3),
               "goodput": round(productive / wall, 4) if wall > 0 else 0.0}
        self._append(row)
        return row

    def _append(self, row: Mapping[str, Any]) -> None:
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk must not end the supervisor
            print(f"warning: {self._path} cannot be written: {error.strerror}", flush=True)
