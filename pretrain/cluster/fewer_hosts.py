"""A run on fewer hosts than before: the flags that keep its global batch size, and slow hosts that are left out.

--exclude_stragglers: the events of the last start name the slow hosts. RUN/slow_hosts.json has the hosts of the newest
start and the ranks on each, and the hosts that are left out with the number of starts. Without the file, every host is
used again.
"""

import contextlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.active_extensions import extensions
from pretrain.cluster.outcome import read_patiently
from pretrain.data.token_schedules import recorded_batch_sizes
from pretrain.errors import ConfigError, counted, printable, shorten
from pretrain.monitor.read_run_folder import is_number, read_events
from pretrain.paths import replace_file
from pretrain.stored_json import build, read_json

HOST_FILTERS = ("include", "exclude", "num_nodes", "num_gpus", "exclude_stragglers")
STARTS = 3  # number of starts of which a slow host is left out; then it is tried again
SLOW_HOSTS = "slow_hosts.json"


def batch_flags(ranks: int, previous: Mapping[str, Any], flag: str = "--exclude_stragglers") -> list[str]:
    """Return the flags of train.py with which `ranks` ranks keep the global batch size of `previous`.

    Raises ConfigError if the global batch cannot be divided.

    Args:
        ranks: of the next start.
        previous: record of run.json.
        flag: the one that lets a run continue on fewer hosts.
    """
    return [f"--gradient_accumulation_steps={_accumulation_steps(ranks, previous, flag)}",
            f"--global_batch_size={previous['batch']['global_batch_size']}"]


def check_batch(hosts: Mapping[str, int], previous: Mapping[str, Any]) -> None:
    """Raise ConfigError if the global batch of `previous` cannot be divided among the ranks of these hosts."""
    batch_flags(sum(hosts.values()), previous)


def _accumulation_steps(ranks: int, previous: Mapping[str, Any], flag: str) -> int:
    layout, batch = previous["layout"], previous["batch"]
    micro_batch, global_batch = batch["micro_batch_size"], batch["global_batch_size"]
    ranks_per_model = layout["world_size"] // layout["data_parallel_size"]
    samples_per_accumulation_step = micro_batch * (ranks // ranks_per_model)
    undivided = [size for _, size in recorded_batch_sizes(previous).stages
                 if ranks < ranks_per_model or ranks % ranks_per_model or size % samples_per_accumulation_step]
    if undivided:
        raise ConfigError(
            flag, problem=f"the {ranks} remaining ranks cannot divide the global batch of {undivided[0]}, "
            f"with {ranks_per_model} ranks per model and a micro batch of {micro_batch}",
            remedy=f"choose slots and a global batch that also work with fewer hosts, or leave {flag} out")
    return int(global_batch // samples_per_accumulation_step)


def is_one_of(host: str, hosts: Iterable[str]) -> bool:
    """Return whether `host` has the address of one of the hosts; False for ""."""
    return bool(host) and _address(host) in {_address(other) for other in hosts}


def _address(host: str) -> str:
    """Return the IP address of the host, or its name if that does not resolve."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return host


@dataclass(frozen=True)
class LeftOut:
    """A host that is left out: why, and of how many further starts."""

    starts: int
    reason: str


@dataclass(frozen=True)
class SlowHosts:
    """Content of RUN/slow_hosts.json."""

    hosts: dict[str, int] = field(default_factory=dict)  # host -> ranks of the newest start, in the order of the ranks
    events_bytes: int = 0  # size of events.jsonl when this start began
    left_out: dict[str, LeftOut] = field(default_factory=dict)


def read_slow_hosts(run: Path) -> SlowHosts:
    """Return the record; an empty one if there is no valid file."""
    with contextlib.suppress(OSError, ValueError):
        return build(SlowHosts, read_json(run / SLOW_HOSTS))
    return SlowHosts()


def hosts_to_leave_out(run: Path, hosts: Mapping[str, int]) -> dict[str, LeftOut]:
    """Return the hosts that the next start should not use: the slowest of the last start first, then the older ones.

    `hosts`: host -> number of ranks, which the last start used if the record does not say it.
    """
    record = read_slow_hosts(run)
    events = read_patiently(run, lambda: read_events(run, record.events_bytes), otherwise=list[dict[str, Any]]())
    named = slow_hosts_of(events, record.hosts or hosts)
    older = {host: LeftOut(left_out.starts - 1, left_out.reason) for host, left_out in record.left_out.items()
             if left_out.starts > 1 and host not in named}
    return {**{host: LeftOut(STARTS, reason) for host, reason in named.items()}, **older}


def record_start(run: Path, hosts: Mapping[str, int], left_out: Mapping[str, LeftOut]) -> None:
    """Write the hosts of a start that begins now. Failures are ignored: the next start then leaves out no host."""
    events = run / "events.jsonl"
    with contextlib.suppress(OSError):
        size = events.stat().st_size if events.is_file() else 0
        text = json.dumps({"hosts": dict(hosts), "events_bytes": size,
                           "left_out": {host: vars(each) for host, each in left_out.items()}}, indent=1)
        run.mkdir(parents=True, exist_ok=True)
        replace_file(run / SLOW_HOSTS, lambda temporary: temporary.write_text(f"{text}\n", encoding="utf-8"))


def slow_hosts_of(events: Sequence[Mapping[str, Any]], ranks_on: Mapping[str, int]) -> dict[str, str]:
    """Return host -> why, of the hosts that were slow until the end of the last start, the slowest first.

    An event has the names that the hosts give themselves. If the hostfile has others, such as addresses, the ranks
    say which host it is.

    Args:
        events: of the run; those before the newest start do not count.
        ranks_on: hosts of the newest start in the order of the ranks -> number of ranks.
    """
    slow: list[Mapping[str, Any]] = []
    # event of an extension that says which ranks are slow -> events that say that they are no longer
    ends = {event: problem.over or () for each in extensions() for event, problem in each.problems.items()
            if problem.is_phase}
    for event in events:
        if event["event"] == "start":
            slow = []
            # otherwise these are the hosts of another start
            ranks_on = ranks_on if event.get("world_size") in (None, sum(ranks_on.values())) else {}
        elif event["event"] in ends:
            slow.append(event)
        else:
            slow = [each for each in slow if event["event"] not in ends[each["event"]]
                    or not set(_list(each, "ranks")) & set(_list(event, "ranks"))]
    slow.sort(key=lambda event: -float(event["ratio"]) if is_number(event.get("ratio")) else 0.0)
    found: dict[str, str] = {}
    for event in slow:
        for host in _hosts_of(event, ranks_on):
            found.setdefault(host, shorten(printable(str(event.get("reason") or "slow ranks")), 300))
    return found


def _hosts_of(event: Mapping[str, Any], ranks_on: Mapping[str, int]) -> list[str]:
    names = [name for name in _list(event, "hosts") if isinstance(name, str)]
    if not ranks_on or set(names) & set(ranks_on):
        return names
    host_of = [host for host, ranks in ranks_on.items() for _ in range(ranks)]
    ranks = [rank for rank in _list(event, "ranks") if isinstance(rank, int) and 0 <= rank < len(host_of)]
    return list(dict.fromkeys(host_of[rank] for rank in ranks))


def _list(event: Mapping[str, Any], key: str) -> list[Any]:
    value = event.get(key)
    return [each for each in value if isinstance(each, (int, str))] if isinstance(value, list) else []


def choose_without(hosts: Mapping[str, int], slow: Mapping[str, LeftOut], *, min_hosts: int,
                   check: Callable[[dict[str, int]], None], print_line: Callable[[str], None]) -> dict[str, LeftOut]:
    """Return which slow hosts the next start leaves out: as many as possible, and the slowest ones.

    Args:
        hosts: usable host -> number of ranks.
        slow: result of `hosts_to_leave_out`.
        min_hosts: fewest hosts that must remain.
        check: raises ConfigError if the run cannot train on these hosts.
        print_line: prints a line for each host that is left out, or that cannot be.
    """
    wanted = {host: slow[host] for host in slow if host in hosts}
    chosen, why = dict(wanted), ""
    while chosen:
        rest = {host: ranks for host, ranks in hosts.items() if host not in chosen}
        if len(rest) >= min_hosts:
            try:
                check(rest)
                break
            except ConfigError:
                why = f"the other {counted(sum(rest.values()), 'rank')} cannot divide the global batch"
        else:
            why = f"at least {counted(min_hosts, 'host')} must remain"
        chosen.popitem()
    for host, left_out in wanted.items():
        if host in chosen:
            print_line(f"host {host} is left out of {counted(left_out.starts, 'start')} from now on, because it was "
                       f"slow: {left_out.reason}; to use it again, delete {SLOW_HOSTS} in the run folder")
        else:
            print_line(f"host {host} was slow ({left_out.reason}), but cannot be left out: {why}")
    return chosen
