"""Which hosts take part: DeepSpeed's hostfile (`NAME slots=N` a line) and its filters, judged before any is asked."""

import re
from pathlib import Path

from pretrain.errors import ConfigError

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)(\s+#.*)?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # a name, user@name or address that no shell takes apart
EXPECTED = "NAME slots=N"
_MOST_SLOTS = 100_000


def read_hostfile(path: str) -> dict[str, int]:
    """Host -> slots (ranks), in the file's order, which is the order of the ranks.

    Raises ConfigError with the line: no such file, another grammar, a host twice, no slots, no hosts.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}", found=getattr(error, "strerror", None) or "bytes that are no text",
                          expected=f"a file with a line `{EXPECTED}` for each host") from None
    hosts: dict[str, int] = {}
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        host, slots = _parse_line(f"{path}:{number}", text)
        if host in hosts:
            raise ConfigError(f"{path}:{number}", found=f"{host} again", expected="each host on one line",
                              remedy=f"it stands on line {first_line[host]} already: give that line all its slots")
        hosts[host], first_line[host] = slots, number
    if not hosts:
        raise ConfigError(f"--hostfile {path}", found="no hosts", expected=f"a line `{EXPECTED}` for each host")
    return hosts


def _parse_line(where: str, text: str) -> tuple[str, int]:
    match = _LINE.fullmatch(text)
    if match is None:
        remedy = f"{text.split()[0]} slots=1 for one rank on it" if len(text.split()) == 1 else \
            "no spaces around ="
        raise ConfigError(where, found=repr(text), expected=f"`{EXPECTED}`, N the ranks of this host", remedy=remedy)
    if not _NAME.fullmatch(match["host"]):
        remedy = "put `User` into ~/.ssh/config" if "@" in match["host"] else ""
        raise ConfigError(where, found=repr(match["host"]), expected="a host name or IPv4 address", remedy=remedy)
    if int(match["slots"]) == 0:
        raise ConfigError(where, found="slots=0", expected="at least 1",
                          remedy="start the line with # to leave the host out")
    if int(match["slots"]) > _MOST_SLOTS:
        raise ConfigError(where, found=f"slots={match['slots']}", expected=f"at most {_MOST_SLOTS}")
    return match["host"], int(match["slots"])


def choose_hosts(hosts: dict[str, int], *, include: str = "", exclude: str = "", num_nodes: int = -1,
                 num_slots: int = -1) -> dict[str, list[int]]:
    """Host -> the slots that take part, as `deepspeed` resolves the same flags. Raises ConfigError.

    Args:
        hosts: of `read_hostfile`.
        include: `HOST[:SLOT,SLOT][@HOST...]`, and nothing else; `exclude` likewise: all but these.
        num_nodes: the first so many hosts; -1: all.
        num_slots: the first so many slots of each host; -1: all.
    """
    if (include and exclude) or ((include or exclude) and (num_nodes > 0 or num_slots > 0)):
        raise ConfigError("command line", found="more than one of --include, --exclude, --num_nodes/--num_gpus",
                          expected="one way to choose hosts")
    chosen = {host: list(range(slots)) for host, slots in hosts.items()}
    named = _parse_filter("--include" if include else "--exclude", include or exclude, chosen)
    if include:
        chosen = {host: named[host] for host in chosen if host in named}
    elif exclude:
        chosen = {host: [slot for slot in slots if slot not in named.get(host, [])] for host, slots in chosen.items()}
        chosen = {host: slots for host, slots in chosen.items() if slots}
        if not chosen:
            raise ConfigError("--exclude", found="every slot", expected="at least one that remains")
    if num_nodes > len(chosen):
        raise ConfigError("--num_nodes", found=num_nodes, expected=f"at most the hostfile's {len(chosen)}")
    if num_nodes > 0:
        chosen = dict(list(chosen.items())[:num_nodes])
    few = [host for host, slots in chosen.items() if num_slots > len(slots)]
    if few:
        raise ConfigError("--num_gpus", found=num_slots,
                          expected=f"at most the {len(chosen[few[0]])} slots of {few[0]}")
    return {host: slots[:num_slots] if num_slots > 0 else slots for host, slots in chosen.items()}


def _parse_filter(flag: str, text: str, there: dict[str, list[int]]) -> dict[str, list[int]]:
    named: dict[str, list[int]] = {}
    for part in text.split("@") if text else []:
        host, colon, slots = part.partition(":")
        if host not in there:
            raise ConfigError(flag, found=repr(host), expected="a host of the hostfile",
                              remedy=f"it has {', '.join(list(there)[:8])}", word=host, known=there)
        words = slots.split(",") if colon else [str(slot) for slot in there[host]]
        wrong = [word for word in words if not word.isdecimal() or int(word) not in there[host]]
        if wrong:
            raise ConfigError(f"{flag} {part}", found=f"slot {wrong[0]!r}",
                              expected=f"numbers from 0 to {len(there[host]) - 1} with commas between (no ranges)")
        named[host] = sorted({*named.get(host, []), *map(int, words)})
    return named
