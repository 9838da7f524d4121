"""The guards that a rank starts before it imports torch, and stops after training."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.distributed.world import World
from pretrain.resilience.launcher_watch import LauncherWatch
from pretrain.resilience.run_lock import RunLock
from pretrain.resilience.watchdog import TimeOuts, Watchdog


@dataclass(frozen=True)
class RankGuards:
    """The guards of one rank's process, as opposed to those of its steps (`Guard`, `ReplicaCheck`)."""

    lock: RunLock
    launcher: LauncherWatch
    watchdog: Watchdog


@contextlib.contextmanager
def rank_guards(run: Path, world: World, time_outs: TimeOuts, launcher: LauncherWatch) -> Iterator[RankGuards]:
    """Hold the lock of the run folder, and run the watchdog. Raises ConfigError if another start holds the lock."""
    with RunLock(run, active=world.rank == 0) as lock, Watchdog(run, world, time_outs) as watchdog:
        yield RankGuards(lock, launcher, watchdog)
