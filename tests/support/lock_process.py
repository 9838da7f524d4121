"""A process that takes the lock of a run folder and then writes into the folder, for tests/resilience/test_run_lock.py.

    python -m tests.support.lock_process RUN SECONDS [here|stopped] [STALE_S]

It prints a line when it holds the lock, or why it does not. It then appends a line to RUN/metrics.jsonl every 0.2 s.
"stopped": it pretends to run on another host, so that only its heartbeat shows whether it lives, and stops itself
(SIGSTOP) after its first line. With STALE_S, all time-outs are scaled down, so that the lease is stale after this time.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience import lease_file, run_lock


@dataclass(frozen=True)
class OwnerElsewhere(lease_file.Owner):
    """The owner of a lease on another host."""

    boot_id: str = "another boot"


def scale_time(stale_s: float) -> None:
    """Make leases stale after `stale_s` seconds instead of 60, and scale the other times with it."""
    for name in ("HEARTBEAT_S", "WATCH_S", "STALE_S", "_CONFIRM_S", "_POLL_S"):
        setattr(run_lock, name, getattr(run_lock, name) * stale_s / 60)


def main(run: Path, seconds: float, where: str = "here", stale_s: float = 60) -> int:
    scale_time(stale_s)
    if where == "stopped":
        lease_file.Owner = OwnerElsewhere  # type: ignore[misc]
    try:
        with run_lock.RunLock(run) as lock:
            print("held", flush=True)
            folder, end = RunFolder(run, active=True, before_write=lock.confirm), time.monotonic() + seconds
            while time.monotonic() < end:
                folder.metrics({"owner": lock._file.owner.token})
                if where == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                    where = "here"  # after SIGCONT
                time.sleep(0.2)
    except ConfigError as error:
        print(error, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:4], *map(float, sys.argv[4:])))
