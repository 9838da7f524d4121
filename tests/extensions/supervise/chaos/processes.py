"""Faults of processes: find the ranks and launchers of the run on this host, and kill, stop or signal them."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from random import Random

import psutil

from pretrain.cluster.hosts.probe import find_ranks
from pretrain.extensions.supervise.next_start import identity

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class NotAppliedError(Exception):
    """A fault could not be applied. The message says why."""


def ranks(command: Sequence[str]) -> list[psutil.Process]:
    """Return the ranks of the command on this host, sorted by rank. Child processes of ranks are left out."""
    found = {process.pid: process for process in find_ranks(os.getcwd(), identity(command))}
    with_rank = []
    for process in found.values():
        with contextlib.suppress(psutil.Error, KeyError, ValueError):
            if process.ppid() not in found:
                with_rank.append((int(process.environ()["RANK"]), process.pid, process))
    return [process for _, _, process in sorted(with_rank)]


def launchers(command: Sequence[str]) -> list[psutil.Process]:
    """Return the processes between this process and a rank, from the command itself to DeepSpeed's launcher.

    Before the ranks exist, this is the command alone. If the launchers have ended, it is empty.
    """
    own, found = os.getpid(), ranks(command)
    with contextlib.suppress(psutil.Error):
        if not found:
            return psutil.Process().children()[:1]
        parents = found[0].parents()
        pids = [process.pid for process in parents]
        return list(reversed(parents[:pids.index(own)])) if own in pids else []
    return []


def kill_rank(command: Sequence[str], random: Random) -> str:
    """Send SIGKILL to a random rank. Return what was done."""
    victim = _choose(ranks(command), random)
    with contextlib.suppress(psutil.Error):
        victim.kill()
    return f"SIGKILL to process {victim.pid}"


def kill_launcher(command: Sequence[str], random: Random) -> str:
    """Send SIGKILL to a random launcher: the command, or a process between it and the ranks. Return what was done."""
    found = launchers(command)
    victim = _choose(found, random)
    with contextlib.suppress(psutil.Error):
        victim.kill()
    return f"SIGKILL to launcher {found.index(victim) + 1} of {len(found)}"


def send_signal(command: Sequence[str], random: Random) -> str:
    """Send a random signal to one rank, to all ranks or to the command. Return what was done."""
    number, target = random.choice(SIGNALS), random.choice(("one rank", "all ranks", "the launcher"))
    found = launchers(command)[:1] if target == "the launcher" else ranks(command)
    victims = found if target == "all ranks" else [_choose(found, random)]
    if not victims:
        raise NotAppliedError("there is no rank")
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.send_signal(number)
    return f"{number.name} to {target}"


@contextlib.contextmanager
def stopped_rank(command: Sequence[str], random: Random) -> Iterator[psutil.Process]:
    """Stop a random rank (SIGSTOP) until the context is closed, or the rank has ended."""
    victim = _choose(ranks(command), random)
    with contextlib.suppress(psutil.Error):
        victim.suspend()
    try:
        yield victim
    finally:
        with contextlib.suppress(psutil.Error):
            victim.resume()


def _choose(processes: Sequence[psutil.Process], random: Random) -> psutil.Process:
    if not processes:
        raise NotAppliedError("there is no such process")
    return random.choice(list(processes))
