"""The file of a lease: who holds it, and how it is created and taken over so that exactly one process wins.

A lease is a small file. Its first line describes the owner; a second line says that the owner has released the lease.
While the owner lives, it sets the file's modification time every few seconds (the heartbeat). The file is created with
link(2), which either makes a complete file or fails, also on NFS. File systems without hard links use O_EXCL.

A lease that is released or whose owner is dead has one successor, a file whose name contains the token of the lease.
Of several candidates only one can create it. The successor then replaces the lease by rename(2). A lease is never
deleted, so that a slow candidate cannot take over a lease that is no longer the newest.

Imports neither torch nor DeepSpeed.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pretrain.distributed.host import boot_id, is_running, pid_namespace, start_time
from pretrain.stored_json import build, open_regular, parse_json

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_LARGEST_BYTES = 2**16
_LATEST = 2.0**37  # seconds since 1970: the year 6325; time.gmtime fails for much larger ones
_ABANDONED_S = 3600.0  # age of a temporary file that no candidate uses any more


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease. The default values describe this process."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)  # when the process asked for the lease, in seconds since 1970
    process_start: int = field(default_factory=lambda: start_time(os.getpid()) or 0)  # in clock ticks since boot
    boot_id: str = field(default_factory=boot_id)
    pid_namespace: int = field(default_factory=pid_namespace)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.time))
        return f"process {self.pid} on {self.host}, started {started}"

    def runs(self) -> bool | None:
        """Return whether the process runs; None if that cannot be seen from here (another host or container)."""
        is_known = self.boot_id != "" and self.pid_namespace != 0
        if not is_known or (self.boot_id, self.pid_namespace) != (boot_id(), pid_namespace()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # a process of another user
            return None
        return is_running(self.pid, self.process_start)


@dataclass(frozen=True)
class Lease:
    """Content of a lease file at one moment."""

    path: Path
    owner: Owner
    heartbeat_ns: int  # modification time of the file, by the clock of its file system
    released: bool


def read_lease(path: Path) -> Lease | None:
    """Read the lease; None if there is no such file. An incomplete file (see O_EXCL) has an unknown owner.

    Opening the file makes NFS fetch its current content and modification time from the server.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(path, largest_bytes=_LARGEST_BYTES) as file:
        status = os.fstat(file.fileno())
        first, newline, rest = file.read().decode(errors="replace").partition("\n")
        owner = _parse_owner(first) or Owner("an unknown host", 0, status.st_mtime, 0, "", 0,
                                             f"unreadable{status.st_ino}")
        return Lease(path, owner, status.st_mtime_ns, released=bool(newline and rest))
    return None


def _parse_owner(line: str) -> Owner | None:
    """Return the owner that the first line of a lease describes; None if it is no such line."""
    try:
        values = parse_json(line)
        owner = build(Owner, values)
    except ValueError:
        return None
    is_valid = 0 < owner.pid < 2**31 and 0 <= owner.time < _LATEST and owner.token.isalnum() and len(owner.token) < 100
    return owner if is_valid and values.keys() == asdict(owner).keys() else None


class LeaseFile:
    """A lease at `path`, seen by one process that wants it, or only looks at it."""

    def __init__(self, path: Path) -> None:
        self.path, self.owner = path, Owner()
        self._content = json.dumps(asdict(self.owner)) + "\n"
        self._temporary = self._name("tmp-" + self.owner.token)

    def _name(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def chain(self) -> list[Lease]:
        """Return the lease and its successors. The last one counts; usually it is the only one."""
        found, path = [], self.path
        while (lease := read_lease(path)) is not None:
            found.append(lease)
            path = self._name(lease.owner.token)
        return found

    def prepare(self) -> None:
        """Write this process's temporary file, which `create` and `take_over` link. Raises OSError."""
        with open(self._temporary, "x", encoding="utf-8") as file:
            file.write(self._content)
            file.flush()
            os.fsync(file.fileno())

    def discard_temporary(self) -> None:
        """Remove the temporary file, and those that killed candidates left behind."""
        with contextlib.suppress(OSError):
            now = self.now_ns()
            self._temporary.unlink()
            for path in self.path.parent.glob(f"{self.path.name}.tmp-*"):
                if now - path.stat().st_mtime_ns > _ABANDONED_S * 1e9:
                    path.unlink()

    def now_ns(self) -> int:
        """Return the current time by the clock that also sets the heartbeat's time: the file system's.

        It is the file server's clock on NFS, and this host's on a local disk. Lustre uses the clock of each client.
        """
        os.utime(self._temporary)
        return os.stat(self._temporary).st_mtime_ns

    def create(self) -> bool:
        """Take a lease that has never existed. Returns False if another process was faster. Raises OSError."""
        return self._link(self.path)

    def take_over(self, stale: Lease) -> bool:
        """Replace a stale lease, the last of the chain. Returns False if another process was faster. Raises OSError."""
        claim = self._name(stale.owner.token)
        if not self._link(claim):
            return False
        chain = self.chain()
        if not chain or chain[-1].owner.token != self.owner.token:  # the stale lease had already been replaced
            claim.unlink(missing_ok=True)
            return False
        try:
            os.rename(claim, self.path)
        except FileNotFoundError:  # this process was stopped, and counted as dead
            return False
        for older in chain[1:-1]:  # claims of processes that were killed before their rename
            older.path.unlink(missing_ok=True)
        return self.is_ours()

    def is_ours(self) -> bool:
        """Return whether this process holds the lease. Raises OSError."""
        lease = read_lease(self.path)
        return lease is not None and lease.owner.token == self.owner.token

    def beat(self) -> bool:
        """Set the heartbeat. Returns False if another process has taken the lease over. Raises OSError."""
        try:
            with open_regular(self.path, "r+b") as file:
                if self.owner.token.encode() not in file.readline(_LARGEST_BYTES):
                    return False
                os.utime(file.fileno())  # the file that was read, even if it has just been replaced
        except FileNotFoundError:  # somebody has deleted the file
            return self._create_exclusively(self.path) or self.is_ours()
        return True

    def release(self) -> None:
        """Mark the lease as released, unless it belongs to another process. Raises OSError."""
        with open_regular(self.path, "r+b") as file:
            if self.owner.token.encode() in file.readline(_LARGEST_BYTES):
                file.seek(0, os.SEEK_END)
                file.write(json.dumps({"released": time.time()}).encode() + b"\n")

    def _link(self, path: Path) -> bool:
        """Create `path` with this process's content. Returns False if it exists. Raises OSError."""
        try:
            os.link(self._temporary, path)
        except FileExistsError:  # also if the server's answer was lost, and the client asked again
            lease = read_lease(path)
            return lease is not None and lease.owner.token == self.owner.token
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return self._create_exclusively(path)
        return True

    def _create_exclusively(self, path: Path) -> bool:
        """Create `path` with O_EXCL, which NFS supports since version 3. Returns False if it exists. Raises OSError."""
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            file.write(self._content)
            return True
        return False
