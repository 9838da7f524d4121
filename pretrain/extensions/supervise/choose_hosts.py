"""Settings of the supervisor, and the hosts and the command of the next start: without unhealthy and slow hosts."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.cluster.fewer_hosts import LeftOut, check_batch, choose_without, hosts_to_leave_out
from pretrain.cluster.hosts.remote import DEFAULT_HEALTH_COMMAND, Transport, default_transport, unhealthy_hosts
from pretrain.errors import ConfigError
from pretrain.extensions.supervise import launch_command
from pretrain.monitor.read_run_folder import read_starts

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class SupervisorSettings:
    """The command to run, the checks before each start, and the limits of restarts."""

    command: list[str]
    run: Path  # run folder
    hostfile: Path | None = None  # None: the supervisor does not know the hosts and does not check them
    max_restarts: int = 5  # restarts in a row without a new step; after these the supervisor gives up
    min_hosts: int | None = None  # run without unhealthy hosts if this many are healthy; None: wait for all hosts
    exclude_stragglers: bool = False  # also leave out the hosts that the last start named as slow
    backoff_s: float = 10.0  # pause before a restart; doubled for each restart without a new step
    backoff_max_s: float = 600.0
    grace_s: float = 1800.0  # time that the run has to save and stop after a signal to the supervisor
    health_command: str = DEFAULT_HEALTH_COMMAND  # shell command that succeeds on a healthy host
    health_timeout_s: float = 60.0
    transport: Transport = field(default_factory=default_transport)
    before_start: Callable[[int], None] = lambda number: None  # called before each start, with its number from 1


@dataclass(frozen=True)
class HostChoice:
    """The command of a start, its hosts, and why it cannot start now."""

    command: list[str]
    hosts: dict[str, int] = field(default_factory=dict)  # host -> number of ranks; {}: not known
    obstacle: str = ""
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # slow hosts


def choose_hosts(settings: SupervisorSettings, print_line: PrintLine) -> HostChoice:
    """Check the hosts. Returns the command for the hosts to use. Raises ConfigError, and OSError for a file."""
    if settings.hostfile is None:
        return HostChoice(settings.command)
    hosts = hosts_of_run(settings)
    unhealthy = unhealthy_hosts(hosts, settings.health_command, settings.transport, settings.health_timeout_s)
    used = {host: slots for host, slots in hosts.items() if host not in unhealthy}
    for host, problem in unhealthy.items():
        print_line(f"host {host} is unhealthy: {problem}")
    command = launch_command.with_hostfile(settings.command, settings.hostfile)
    previous = newest_run_record(settings.run)  # None before the first start: the global batch size is unknown
    if unhealthy and (settings.min_hosts is None or len(used) < settings.min_hosts or previous is None):
        return HostChoice(command, used, "host " + ", ".join(f"{host}: {text}" for host, text in unhealthy.items()))
    slow = _slow_hosts(settings, used, previous, print_line)
    used = {host: slots for host, slots in used.items() if host not in slow}
    missing = [host for host in hosts if host not in used]
    if missing and previous is not None:
        print_line(f"continuing without {', '.join(missing)}")
        command = launch_command.for_fewer_hosts(settings.command, used, missing,
                                                 settings.run / "hostfile.supervised", previous)
    return HostChoice(command, used, left_out=slow)


def hosts_of_run(settings: SupervisorSettings) -> dict[str, int]:
    """Return host -> number of slots; {} without a hostfile. Raises ConfigError, and OSError: it cannot be read now."""
    try:
        return {} if settings.hostfile is None else launch_command.hosts_of(settings.command, settings.hostfile)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


def _slow_hosts(settings: SupervisorSettings, hosts: dict[str, int], previous: dict[str, Any] | None,
                print_line: PrintLine) -> dict[str, LeftOut]:
    """Return the slow hosts that the next start leaves out."""
    if not settings.exclude_stragglers or previous is None:
        return {}
    return choose_without(hosts, hosts_to_leave_out(settings.run, hosts), min_hosts=settings.min_hosts or 1,
                          print_line=print_line, check=lambda rest: check_batch(rest, previous))


def newest_run_record(run: Path) -> dict[str, Any] | None:
    """Return the last record of run.json, or None if the run has never started."""
    with contextlib.suppress(ConfigError, LookupError):
        return read_starts(run)[-1]
    return None
