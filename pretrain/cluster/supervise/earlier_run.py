"""The lock of a supervisor, which shows whether the run of a killed supervisor continues.

The supervisor holds RUN/.supervisor.lock with flock(2), and the command that it runs inherits the lock. If the
supervisor is killed, the lock remains until its command has ended, too: the next supervisor waits for this.
"""

import contextlib
import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path

import psutil

from pretrain.errors import ConfigError
from pretrain.resilience.lease_file import Owner, read_lease
from pretrain.resilience.run_lock import find_owner

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
        earlier = read_lease(path)
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
