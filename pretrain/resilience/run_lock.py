"""The lock of a run folder: only one start at a time may train into it.

Rank 0 holds a lease (lease_file.py) on RUN/.run.lock. Leases need no locks of the file system: NFS, Lustre and others
have none, or only between processes of one host. Imports neither torch nor DeepSpeed: the launchers look at the lock,
too.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pretrain.errors import CRASHED, ConfigError, file_errors
from pretrain.resilience.lease_file import Lease, LeaseFile, Owner, read_lease
from pretrain.terminal import print_line

LOCK = ".run.lock"
HEARTBEAT_S = 2.0
WATCH_S = 7.0  # an owner whose heartbeat has not changed for so long is probably dead; otherwise the start is rejected
STALE_S = 60.0  # age of the heartbeat after which a lease may be taken over
_CONFIRM_S = STALE_S / 2  # age of the last heartbeat after which the owner looks at the lease before it writes
_POLL_S = 0.25
_SEEN_WITHIN_S = 35.0  # NFS remembers for 30 s that a folder has no such file (nfs(5), acdirmin)


def find_owner(run: Path) -> Owner | None:
    """Return the process that trains in the run folder, or None. Takes at most `WATCH_S` seconds, and writes nothing.

    The owner of a lease whose heartbeat does not change counts as dead here. Rank 0 then waits for the time-out.
    """
    with contextlib.suppress(OSError):  # rank 0 reports it
        chain = LeaseFile(run / LOCK).chain()
        if chain and not chain[-1].released:
            runs = chain[-1].owner.runs()
            return chain[-1].owner if (_changes(chain[-1], WATCH_S) if runs is None else runs) else None
    return None


def reject_second_start(run: Path) -> None:
    """Raise ConfigError if another start trains in the run folder. For launchers, before they start ranks."""
    owner = find_owner(run)
    if owner is not None:
        raise _in_use(run, owner)


def release_of_dead_owner(run: Path) -> None:
    """Release the lease if its owner has died on this host. For launchers that have ended their ranks."""
    with contextlib.suppress(OSError):
        file = LeaseFile(run / LOCK)
        lease = read_lease(file.path)
        if lease is not None and not lease.released and lease.owner.runs() is False:
            file.owner = lease.owner
            file.release()


def sees_lock(run: Path, token: str) -> bool:
    """Return whether the lock in `run` has this token. A network file system may show a new file a little later."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if any(lease.owner.token == token for lease in LeaseFile(run / LOCK).chain()):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _in_use(run: Path, owner: Owner) -> ConfigError:
    return ConfigError(f"--save {run}", problem=f"another start is training in this run folder ({owner})",
                       remedy="wait until it ends, stop it, or choose another folder")


def _changes(lease: Lease, seconds: float) -> bool:
    """Watch the lease. Return whether its heartbeat changes within this time: this needs no synchronized clocks."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = read_lease(lease.path)
        if now is None or now.released or now.owner != lease.owner:
            return False
        if now.heartbeat_ns != lease.heartbeat_ns:
            return True
    return False


def _seconds() -> float:
    """Return the seconds of a clock that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class RunLock:
    """The lease on a run folder, held by rank 0. On other ranks it is not active and does nothing.

    A thread sets the heartbeat, for which it needs the interpreter's lock: if other code holds this lock for longer
    than `STALE_S`, another host regards the run as dead. If another start has taken the lease over, this process ends
    at once, without another byte written into the run folder.
    """

    def __init__(self, run: Path, *, active: bool = True, report: Callable[[str], None] = print_line) -> None:
        """Take the lease. Raises ConfigError if a live process holds it, or the file cannot be written."""
        self._run, self._active, self._report = run, active, report
        if not active:
            return
        self._file = LeaseFile(run / LOCK)
        with file_errors("--save", f"the lock {self._file.path} cannot be written ({{}})",
                         "make space, or choose a folder that can be written to"):
            run.mkdir(parents=True, exist_ok=True)
            self._take()
            # an open folder, because a new one could get the number of a deleted one
            self._folder = os.open(run, os.O_PATH | os.O_DIRECTORY)
        self._confirmed_s = _seconds()
        self._ended, self._is_lost = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._heartbeat, name="run-lock", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        """Identifies this lock; "" if it is not active."""
        return self._file.owner.token if self._active else ""

    def _take(self) -> None:
        """Create the lease or take over a stale one. Raises ConfigError and OSError."""
        try:
            self._file.prepare()
            while True:
                chain = self._file.chain()
                if not chain:
                    if self._file.create():
                        return
                elif self._is_stale(chain[-1]) and self._file.take_over(chain[-1]):
                    return
        finally:
            self._file.discard_temporary()

    def _is_stale(self, lease: Lease) -> bool:
        """Return whether the lease may be taken over; False if it has just changed. Waits until that is known.

        Raises ConfigError if the owner lives.
        """
        if lease.released:
            return True
        runs = lease.owner.runs()
        if runs is None:
            return self._is_stale_elsewhere(lease)
        if runs:
            raise _in_use(self._run, lease.owner)
        self._report(f"{self._run}: the earlier start has ended without releasing its lock ({lease.owner})")
        return True

    def _is_stale_elsewhere(self, lease: Lease) -> bool:
        """Decide by the heartbeat, because the owner's process cannot be seen from here. See `_is_stale`."""
        watch_until = time.monotonic() + STALE_S
        silent_for_s = WATCH_S
        while True:
            if _changes(lease, silent_for_s):
                raise _in_use(self._run, lease.owner)
            now = read_lease(lease.path)
            if now is None or now.owner != lease.owner or now.released:
                return False
            age_s = (self._file.now_ns() - lease.heartbeat_ns) / 1e9
            if age_s > STALE_S or time.monotonic() >= watch_until:  # the second: a heartbeat from the future
                self._report(f"{self._run}: taking over the lock of a dead start ({lease.owner})")
                return True
            if silent_for_s == WATCH_S:
                left_s = min(STALE_S - age_s, watch_until - time.monotonic())
                self._report(f"{self._run}: an earlier start has no heartbeat ({lease.owner}); waiting "
                             f"{left_s:.0f} s before its lock is taken over")
            silent_for_s = 1.0

    def _heartbeat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self.confirm(now=True)

    def confirm(self, *, now: bool = False) -> None:
        """End this process if another start holds the lease. Call it before each write into the run folder.

        Reads the file only if the last heartbeat is old, so that nobody else can have taken the lease since then, or
        with `now`. If the file cannot be read, the following write reports that.
        """
        if not self._active or (not now and _seconds() - self._confirmed_s < _CONFIRM_S):
            return
        began_s = _seconds()
        with contextlib.suppress(OSError):
            if not self._file.beat() and not self._ended.is_set():
                self._end_process()
            self._confirmed_s = began_s

    def _end_process(self) -> None:
        """End at once. The other ranks end with this one: their launcher or their next collective notices."""
        self._is_lost.acquire()  # never released: the heartbeat's thread and a write may notice this together
        try:
            other = read_lease(self._file.path)
            line = f"ds-pretrain: error: {self._run}: {self._loss()}, and another start has taken over the run " \
                   f"folder ({other.owner if other else 'unknown'}); this one ends without saving\n"
            os.write(2, line.encode())
        finally:
            os._exit(CRASHED)

    def _loss(self) -> str:
        """Return why another start could take the lease."""
        with contextlib.suppress(OSError):
            if not os.path.samestat(os.stat(self._run), os.fstat(self._folder)):
                return "this folder was deleted or renamed while this process trained into it"
        if _seconds() - self._confirmed_s > STALE_S:
            return f"this process was silent for more than {STALE_S:.0f} s"
        return f"the lock {LOCK} of this process was deleted"

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Release the lease."""
        if self._active:
            self._ended.set()
            self._thread.join(HEARTBEAT_S)
            os.close(self._folder)
            with contextlib.suppress(OSError):
                self._file.release()
