"""Settings of the supervisor, and the hosts and the command of the next start: without unhealthy and slow hosts.

A launch command is any command that starts pretrain/train.py. Its flags, run folder and hostfile are read, and it is
rewritten for other hosts. For example:

    deepspeed [launcher flags] pretrain/train.py FLAGS
    ds-pretrain [launcher flags] FLAGS
    launch/cluster.sh [launcher flags] -- FLAGS
    srun ... python -m pretrain.train FLAGS
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.cluster.fewer_hosts import (
    HOST_FILTERS,
    LeftOut,
    batch_flags,
    check_batch,
    choose_without,
    hosts_to_leave_out,
    is_one_of,
)
from pretrain.cluster.hosts.hostfile import hosts_from_flags
from pretrain.cluster.hosts.remote import DEFAULT_HEALTH_COMMAND, Transport, default_transport, unhealthy_hosts
from pretrain.cluster.launcher_flags import host_flags, split_command_line
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.parse import parse_arguments, read_yaml
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import read_starts
from pretrain.old_names import current_name

_OWN_LAUNCHERS = ("ds-pretrain", "pretrain", "cluster.sh")  # they find train.py's flags without a separator
_HOSTFILE_LAUNCHERS = (*_OWN_LAUNCHERS, "deepspeed", "mpirun", "mpiexec")  # accept --hostfile
PrintLine = Callable[[str], None]


def with_separator(command: Sequence[str]) -> list[str]:
    """Insert `--` before the flags of train.py if the launcher is one of `_OWN_LAUNCHERS`. Returns the new command."""
    launcher = command[:_train_flags_index(command)] or command
    at = next((at for at, word in enumerate(launcher) if Path(word).name in _OWN_LAUNCHERS), None)
    if at is None:
        return list(command)
    rest = command[at + 1:]
    flags, train = split_command_line(rest[1:] if rest[0] == "train" else rest)
    return [*command[:at + 1], *flags, "--", *train]


def _train_flags_index(command: Sequence[str]) -> int:
    """Return the index after train.py, pretrain.train or else `--`, where the flags of the run begin; otherwise 0."""
    names = [Path(word).name for word in command]
    end = next((name for name in ("train.py", "pretrain.train", "--") if name in names), None)
    return 0 if end is None else names.index(end) + 1


def train_flags(command: Sequence[str]) -> list[str]:
    """Return the part of the command that is for train.py."""
    return list(command[_train_flags_index(command):])


def _launcher_words(command: Sequence[str]) -> list[str]:
    """Return the part of the command before train.py's flags."""
    return list(command[:_train_flags_index(command)])


def flag_value(words: Sequence[str], name: str) -> str | None:
    """Return the value of the last `--name VALUE` or `--name=VALUE`, or None. `--a-b` is the same flag as `--a_b`."""
    value = None
    for at, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag.startswith("-") and current_name(flag.lstrip("-")) == name:
            value = text if equals else words[at + 1] if at + 1 < len(words) else None
    return value


def run_setting(command: Sequence[str], name: str) -> str | None:
    """Return the value of a flag of train.py, from the command or from its --config YAML, or None if neither has it.

    Raises ConfigError if the YAML cannot be read.
    """
    words = train_flags(command)
    value = flag_value(words, name)
    if value is not None:
        return value
    ends = [at + 1 for at, word in enumerate(words) if word.partition("=")[0] == "--config"]
    for path in (flag_value(words[:end + 1], "config") for end in reversed(ends)):  # later files win
        if path is not None and name in (values := read_yaml(path)):
            found = values[name][1]
            return found if isinstance(found, str) else None
    return None


def run_arguments(command: Sequence[str], run: Path) -> RunArguments | None:
    """Return the flags of the run in `run`, or None if the command does not have them: a script may give them."""
    try:
        return dataclasses.replace(parse_arguments(train_flags(command)), save=str(run))
    except ConfigError:
        return None


def run_folder(command: Sequence[str], override: str | None) -> Path:
    """Return `override`, or the value of --save in the command or its YAML. Raises ConfigError if there is none."""
    found = override or run_setting(command, "save")
    if not found:
        raise ConfigError("--save", problem="the supervisor needs the run folder, to read the run's progress",
                          remedy="give --save to train.py, or to supervise.py (before the `--`)")
    return Path(str(found)).absolute()


def hostfile_of(command: Sequence[str], override: str | None) -> Path | None:
    """Return `override`, or the value of --hostfile (-H) among the launcher's flags, or None."""
    found = override or launcher_host_flags(command).hostfile
    return Path(found) if found else None


def launcher_host_flags(command: Sequence[str]) -> argparse.Namespace:
    """Return the launcher's flags that choose hosts, such as --include. Raises ConfigError for a wrong value."""
    words = [word for word in _launcher_words(command) if word != "--"]
    # without flags such as -iface of mpirun, which argparse would read as `-i face`
    return host_flags([word for word in words if word.startswith("--") or not word.startswith("-")
                       or len(word.partition("=")[0]) == 2])


def hosts_of(command: Sequence[str], hostfile: Path) -> dict[str, int]:
    """Return host -> number of slots, for the hosts that the launcher's flags choose. Raises ConfigError."""
    flags = launcher_host_flags(command)
    flags.hostfile = str(hostfile)
    return {host: len(slots) for host, slots in hosts_from_flags(flags).items()}


def with_hostfile(command: Sequence[str], hostfile: Path) -> list[str]:
    """Return the command with this hostfile instead of its own.

    Raises ConfigError if the command has no --hostfile and is not known to accept one.
    """
    words = list(command)
    for at, word in enumerate(words[:_train_flags_index(words)]):
        flag, equals, _ = word.partition("=")
        if flag in ("--hostfile", "-H"):
            words[at:at + (1 if equals else 2)] = [flag, str(hostfile)]
            return words
    for at, word in enumerate(words[:_train_flags_index(words)]):
        if Path(word).name in _HOSTFILE_LAUNCHERS:
            return [*words[:at + 1], "--hostfile", str(hostfile), *words[at + 1:]]
    raise ConfigError("--hostfile", problem=f"the command {words[0]} accepts no hostfile",
                      remedy=f"use one of {', '.join(_HOSTFILE_LAUNCHERS)}")


def check_can_lose_hosts(command: Sequence[str]) -> None:
    """Raise ConfigError if the command cannot be used with --min_hosts.

    The command must accept a hostfile, and no other flag may choose the hosts.
    """
    with_hostfile(command, Path("hosts"))
    flags, default = launcher_host_flags(command), host_flags([])
    for name in HOST_FILTERS:
        if getattr(flags, name) != getattr(default, name):
            raise ConfigError(f"--{name}", problem="this flag cannot be combined with --min_hosts",
                              remedy="give it to the supervisor instead" if name == "exclude_stragglers" else
                              "list in the hostfile exactly the hosts and slots to use")


def for_fewer_hosts(command: Sequence[str], hosts: Mapping[str, int], dropped: Sequence[str], hostfile: Path,
                    previous: Mapping[str, Any]) -> list[str]:
    """Return the command for fewer hosts with an unchanged global batch size, and write their hostfile.

    Raises ConfigError if the global batch cannot be divided among the remaining ranks.

    Args:
        command: launch command for all hosts.
        hosts: remaining host -> number of slots.
        dropped: the other hosts.
        hostfile: path of the hostfile to write.
        previous: record of run.json, with the global batch size.
    """
    flags = batch_flags(sum(hosts.values()), previous, "--min_hosts")
    hostfile.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items()), encoding="utf-8")
    words = _with_master(with_hostfile(command, hostfile), dropped, next(iter(hosts)))
    if len(hosts) == 1:
        words = _with_force_multi(words)
    return [*words, *flags]


def _with_master(command: list[str], dropped: Sequence[str], first: str) -> list[str]:
    """If --master_addr is a dropped host, replace it by `first`, the first remaining host. Returns the command."""
    master = launcher_host_flags(command).master_addr
    if not is_one_of(master, dropped):
        return command
    end = _train_flags_index(command)
    head = [word.replace(master, first) if word == master or word.endswith(f"={master}") else word
            for word in command[:end]]
    return head + command[end:]


def _with_force_multi(command: list[str]) -> list[str]:
    """Add --force_multi to a `deepspeed` command. Without it, `deepspeed` would start a single host's ranks here."""
    launcher = command[:_train_flags_index(command)]
    at = next((at for at, word in enumerate(launcher) if Path(word).name == "deepspeed"), None)
    return command if at is None else [*command[:at + 1], "--force_multi", *command[at + 1:]]


def identity(command: Sequence[str]) -> list[str]:
    """Return the flags of train.py, which identify the ranks of this run in a list of processes.

    Returns [] if the flags have neither --save nor --config: other runs could have the same flags.
    """
    words = train_flags(command)
    named = any(flag_value(words, name) is not None for name in ("save", "config"))
    return words if named else []


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
    command = with_hostfile(settings.command, settings.hostfile)
    previous = newest_run_record(settings.run)  # None before the first start: the global batch size is unknown
    if unhealthy and (settings.min_hosts is None or len(used) < settings.min_hosts or previous is None):
        return HostChoice(command, used, "host " + ", ".join(f"{host}: {text}" for host, text in unhealthy.items()))
    slow = _slow_hosts(settings, used, previous, print_line)
    used = {host: slots for host, slots in used.items() if host not in slow}
    missing = [host for host in hosts if host not in used]
    if missing and previous is not None:
        print_line(f"continuing without {', '.join(missing)}")
        command = for_fewer_hosts(settings.command, used, missing,
                                                 settings.run / "hostfile.supervised", previous)
    return HostChoice(command, used, left_out=slow)


def hosts_of_run(settings: SupervisorSettings) -> dict[str, int]:
    """Return host -> number of slots; {} without a hostfile. Raises ConfigError, and OSError: it cannot be read now."""
    try:
        return {} if settings.hostfile is None else hosts_of(settings.command, settings.hostfile)
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
