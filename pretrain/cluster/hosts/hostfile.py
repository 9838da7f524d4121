"""Read DeepSpeed's hostfile (a line `NAME slots=N` for each host), and apply filters such as --include."""

import argparse
import re

from pretrain.errors import ConfigError, file_errors
from pretrain.stored_json import read_settings

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)(\s+#.*)?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # excludes characters that a shell interprets
_FORMAT = "NAME slots=N"
_MAX_SLOTS = 100_000
_SLOTS = re.compile(r"(?<![\w-])slots\s*[=:]?\s*(\d+)\b", re.IGNORECASE)
_ONE_NUMBER = re.compile(r"(?:[A-Za-z_][\w-]*\s*[=:]\s*)?(\d+)\W?")  # the number alone, or under another name
_RANGE = re.compile(r"[\w.-]+[\[{].*")  # node[1-4], node{1..4}


def read_hostfile(path: str) -> dict[str, int]:
    """Return host -> number of slots (ranks). The order of the file is the order of the ranks.

    Raises ConfigError if the file is unreadable (its cause is an OSError) or has no hosts. Also raises it, with the
    line number, if a line has the wrong format, names a host again or gives 0 slots.
    """
    with file_errors(f"--hostfile {path}", "the hostfile cannot be read: {}",
                     f"give a file with a line `{_FORMAT}` for each host", (OSError, ValueError)):
        lines = read_settings(path).splitlines()
    hosts: dict[str, int] = {}
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        host, slots = _parse_line(f"{path}:{number}", text)
        if host in hosts:
            raise ConfigError(f"{path}:{number}", problem=f"host {host} is already on line {first_line[host]}",
                              remedy=f"put all slots of {host} on line {first_line[host]}, and delete line {number}")
        hosts[host], first_line[host] = slots, number
    if not hosts:
        raise ConfigError(f"--hostfile {path}", problem="the file has no hosts",
                          remedy=f"write a line `{_FORMAT}` for each host")
    return hosts


def _parse_line(where: str, text: str) -> tuple[str, int]:
    """Return (host, number of slots). `where`: file and line number, for errors. Raises ConfigError."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise ConfigError(where, found=repr(text), remedy=_right_line(text),
                          expected=f"`{_FORMAT}`, where N is the number of ranks on this host")
    if not _NAME.fullmatch(match["host"]):
        raise ConfigError(where, found=repr(match["host"]), expected="a host name or IPv4 address",
                          remedy=_right_line(text))
    if int(match["slots"]) == 0:
        raise ConfigError(where, found="slots=0", expected="at least 1",
                          remedy="start the line with # to leave the host out")
    if int(match["slots"]) > _MAX_SLOTS:
        raise ConfigError(where, found=f"slots={match['slots']}", expected=f"at most {_MAX_SLOTS}")
    return match["host"], int(match["slots"])


def _right_line(text: str) -> str:
    """Return the remedy for a line that is rejected: the line that it probably means, which is accepted."""
    words = re.sub(r"^([\w.@-]+):(?!:)", r"\1 ", text.partition("#")[0]).split()  # MPICH writes NAME:N
    host, settings = (words[0].rstrip(",;"), " ".join(words[1:])) if words else ("", "")
    user, _, name = host.rpartition("@")
    if _RANGE.fullmatch(name) or re.match(r"(?!slots\b)[A-Za-z][\w.-]*(?![\w.-]|\s*[=:])", settings):
        return f"write a line `{_FORMAT}` for each host"
    if not _NAME.fullmatch(name):
        return "begin the line with the name of a host, or with # to leave it out"
    number = _SLOTS.search(settings) or _ONE_NUMBER.fullmatch(settings)
    right = number is not None and 0 < int(number[1]) <= _MAX_SLOTS
    line = f"write `{name} slots={number[1]}`" if number and right else \
        f"write `{name} slots=1` for one rank on this host"
    line += ", without spaces around =" if re.search(r"\s=|=\s", settings) else ""
    return line + (", and the user as `User` into ~/.ssh/config" if user else "")


def choose_hosts(hosts: dict[str, int], *, include: str = "", exclude: str = "", num_nodes: int = -1,
                 num_slots: int = -1) -> dict[str, list[int]]:
    """Return host -> slot numbers of the run. `deepspeed` chooses the same ones. Raises ConfigError.

    Args:
        hosts: host -> number of slots, from `read_hostfile`.
        include: use only these hosts or slots, in the format `HOST[:SLOT,SLOT][@HOST...]`.
        exclude: use all hosts and slots but these, in the same format.
        num_nodes: use only the first N hosts; -1: all.
        num_slots: use only the first N slots of each host; -1: all.
    """
    if (include and exclude) or ((include or exclude) and (num_nodes > 0 or num_slots > 0)):
        raise ConfigError("command line",
                          problem="--include, --exclude and --num_nodes/--num_gpus cannot be combined",
                          remedy="give only one of them")
    chosen = {host: list(range(slots)) for host, slots in hosts.items()}
    named = _parse_filter("--include" if include else "--exclude", include or exclude, chosen)
    if include:
        chosen = {host: named[host] for host in chosen if host in named}
    elif exclude:
        chosen = {host: [slot for slot in slots if slot not in named.get(host, [])] for host, slots in chosen.items()}
        chosen = {host: slots for host, slots in chosen.items() if slots}
        if not chosen:
            raise ConfigError("--exclude", problem="every slot is excluded; at least one must remain")
    if num_nodes > len(chosen):
        raise ConfigError("--num_nodes", found=num_nodes, expected=f"at most {len(chosen)}, the hosts of the hostfile")
    if num_nodes > 0:
        chosen = dict(list(chosen.items())[:num_nodes])
    too_small = next((host for host, slots in chosen.items() if num_slots > len(slots)), None)
    if too_small is not None:
        raise ConfigError("--num_gpus", found=num_slots,
                          expected=f"at most {len(chosen[too_small])}, the slots of {too_small}")
    return {host: slots[:num_slots] if num_slots > 0 else slots for host, slots in chosen.items()}


def hosts_from_flags(flags: argparse.Namespace) -> dict[str, list[int]]:
    """Return host -> slot numbers of the run, from the launcher's flags. Raises ConfigError."""
    return choose_hosts(read_hostfile(flags.hostfile), include=flags.include, exclude=flags.exclude,
                        num_nodes=flags.num_nodes, num_slots=flags.num_gpus)


def _parse_filter(flag: str, text: str, hosts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return host -> slot numbers that the value of --include or --exclude names. Raises ConfigError.

    `hosts`: host -> slot numbers in the hostfile.
    """
    named: dict[str, list[int]] = {}
    for part in text.split("@") if text else []:
        host, colon, slots = part.partition(":")
        if host not in hosts:
            raise ConfigError(flag, found=repr(host), expected="a host of the hostfile",
                              remedy=f"its hosts are {', '.join(list(hosts)[:8])}", word=host, known=hosts)
        words = slots.split(",") if colon else [str(slot) for slot in hosts[host]]
        wrong = [word for word in words if not word.isdecimal() or int(word) not in hosts[host]]
        if wrong:
            raise ConfigError(f"{flag} {part}", found=f"slot {wrong[0]!r}",
                              expected=f"numbers from 0 to {len(hosts[host]) - 1}, separated by commas (no ranges)")
        named[host] = sorted({*named.get(host, []), *map(int, words)})
    return named
