"""Is this cluster fit for a long job? Every rank measures its device, disk, clock and links; rank 0 judges.

A measurement stands out where it is below a share of the median of its kind (`verdict.py`); what is simply wrong (a
matrix product, a changed byte, a full disk, a clock, a rank that says nothing) is a finding by itself.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, TypeVar, cast

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.checkpoint.load.resume import checkpoints_folder
from pretrain.checkpoint.save.space import next_checkpoint_bytes
from pretrain.cluster.health.connections import ClockServer, Reach, host_name, own_address, reach_all
from pretrain.cluster.health.devices import DiskHealth, device_health, disk_health
from pretrain.cluster.health.findings import judge_collectives, judge_devices, judge_disks, judge_links, judge_reach
from pretrain.cluster.health.key_value_store import START_SHARE, Board, SilentRanksError, bounded, first_line, join
from pretrain.cluster.health.links import (
    Collective,
    Link,
    all_gather,
    all_reduce,
    measure_link,
    partner_of,
    rounds,
    spread,
)
from pretrain.cluster.health.report import Report
from pretrain.cluster.health.settings import Settings
from pretrain.config.validate import check_run
from pretrain.distributed.device import detect_device
from pretrain.distributed.process_group import init_process_group
from pretrain.distributed.world import World
from pretrain.engine.build import deepspeed_output
from pretrain.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a rank is, as it tells the others."""

    host: str
    local_rank: int
    address: str  # to be reached at
    port: int


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """Of one rank's measurement."""

    value: T
    error: Exception | None = None  # then the value means nothing


@dataclass(frozen=True)
class Crew:
    """All ranks, and what rank 0 has found so far."""

    board: Board
    world: World
    settings: Settings
    hosts: dict[str, list[int]]  # ranks of each
    report: Report

    def together(self, phase: str, action: Callable[[], T], judge: Callable[[list[T]], None],
                 where: Callable[[int], str] | None = None) -> bool:
        """Every rank acts, within the time-out; rank 0 judges what came out. Whether no rank failed, on every rank.

        Raises ConfigError on every rank where one of them did, and SilentRanksError.
        """
        start = time.monotonic()
        outcome = _outcome(partial(self._on_device, action), self.settings.timeout_s)

        def digest(outcomes: list[Outcome[T]]) -> bool | ConfigError:
            errors = {rank: each.error for rank, each in enumerate(outcomes) if each.error is not None}
            for rank, error in errors.items():
                if isinstance(error, ConfigError):
                    return ConfigError.from_line(f"{self.host_of(rank)}: {error}")
                self.report.add((where or self.host_of)(rank), f"{phase}: {error}")
            if not errors:
                judge([each.value for each in outcomes])
            return not errors

        left_s = max(self.settings.timeout_s - (time.monotonic() - start), 0)  # all began at the same time
        answer = self.board.exchange(phase, outcome, digest, wait_s=left_s)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    def _on_device(self, action: Callable[[], T]) -> T:
        get_accelerator().set_device(self.world.local_rank)  # each thread has its own
        return action()

    def host_of(self, rank: int) -> str:
        """The host's name."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> dict[int, str]:
        return {rank: host for host, ranks in self.hosts.items() for rank in ranks}


def _outcome(action: Callable[[], T], timeout_s: float) -> Outcome[T]:
    try:
        return Outcome(bounded(action, timeout_s))
    except ConfigError as error:
        return Outcome(cast(T, None), error)
    except Exception as error:  # whatever it is, it is a fact about this host
        return Outcome(cast(T, None), RuntimeError(first_line(error)))


def check_cluster(settings: Settings, world: World) -> Report:
    """Measure and judge; all ranks call this. Rank 0 gets the whole report, the others its findings.

    Raises ConfigError (bad input, on every rank) and ConnectionError (rank 0 cannot be reached).
    """
    board = join(world, settings.timeout_s)
    report, server = Report(ranks=world.size), ClockServer()
    hosts: dict[str, list[int]] = {}
    silent: list[int] = []
    try:
        place = Place(host_name(), world.local_rank, own_address(os.environ["MASTER_ADDR"]), server.port)
        places = board.exchange("start", place, list, wait_s=START_SHARE * settings.timeout_s)
        hosts = hosts_of(places)
        crew = Crew(board, world, settings, hosts, report)
        report.hosts = {host: {} for host in hosts}
        _measure(crew, {host: (places[ranks[0]].address, places[ranks[0]].port) for host, ranks in hosts.items()})
        report.findings = board.exchange("verdict", None, lambda _: report.findings)
    except SilentRanksError as error:
        silent = error.ranks
        _report_silence(report, error, hosts)
    finally:
        board.leave(silent)
        server.close()
    return report


def _report_silence(report: Report, silent: SilentRanksError, hosts: dict[str, list[int]]) -> None:
    """Name the hosts of those that said nothing; of a rank that never came only its number is known."""
    came = sorted({place.host for place in silent.came.values() if isinstance(place, Place)})
    for rank in silent.ranks:
        host = next((host for host, ranks in hosts.items() if rank in ranks), f"rank {rank}")
        there = "" if hosts else f"; ranks came from {', '.join(came)}"
        report.add(host, f"rank {rank} of {report.ranks} said nothing for {silent.waited_s:.0f} s "
                         f"({silent.phase}){there}")


def hosts_of(places: list[Place]) -> dict[str, list[int]]:
    """Ranks by host, in the order of their first ranks. Two hosts of one name become `name` and `name#2`."""
    hosts: dict[str, list[int]] = {}
    seen: dict[tuple[str, int], int] = {}
    for rank, place in enumerate(places):
        times = seen[place.host, place.local_rank] = seen.get((place.host, place.local_rank), 0) + 1
        hosts.setdefault(place.host if times == 1 else f"{place.host}#{times}", []).append(rank)
    return hosts


def _measure(crew: Crew, addresses: dict[str, tuple[str, int]]) -> None:
    """One thing after another; what cannot be measured any more after a failure is left out."""
    settings, report = crew.settings, crew.report
    mine = crew.host_of(crew.world.rank)
    first = crew.hosts[mine][0] == crew.world.rank
    others = {host: address for host, address in addresses.items() if host != mine}

    def reached() -> dict[str, Reach]:
        return reach_all(others) if first else {}

    crew.together("connections", reached, partial(judge_reach, report, crew.hosts, settings.max_clock_skew_s))
    crew.together("disk", lambda: _disk(crew) if first else None,
                  partial(judge_disks, report, crew.hosts, settings.min_ratio))
    on_cpu = get_accelerator().device_name() == "cpu"
    size = settings.product_size or (1024 if on_cpu else 8192)
    sound = crew.together("device", lambda: device_health(size, settings.memory_bytes),
                          partial(judge_devices, report, crew.hosts, settings.min_ratio))
    connected = crew.board.exchange("connected", None, lambda _: not report.unreachable)
    if not (sound and connected):
        report.skipped = "no transfers were measured: not every device works, or not every host reaches the others"
        return
    _measure_links(crew, settings.message_bytes or (2**24 if on_cpu else 2**28))


def _disk(crew: Crew) -> DiskHealth:
    """Raises ConfigError for a run that this host would refuse."""
    needed, run = 0, crew.settings.run
    if run is not None:
        plan = check_run(run, world_size=crew.world.size, device=detect_device())
        needed = next_checkpoint_bytes(plan, checkpoints_folder(plan))
    return disk_health(crew.settings.folder, crew.settings.disk_bytes, needed)


def _measure_links(crew: Crew, message_bytes: int) -> None:
    """The process group, collectives, and the pairs of hosts round by round."""
    report, settings = crew.report, crew.settings
    if crew.world.size == 1:
        return
    with deepspeed_output("error"):
        formed = crew.together("process group", lambda: init_process_group(crew.world), lambda _: None)
    if not formed:
        return
    if not crew.together("collectives", lambda: _collectives(message_bytes, list(crew.hosts.values())),
                         partial(judge_collectives, report, crew.hosts, settings.min_ratio)):
        return
    every = rounds(len(crew.hosts))
    chosen = spread(every, settings.rounds)
    report.rounds = (len(chosen), len(every))
    found: dict[tuple[str, str], list[Link]] = {}
    for turn, pairs in enumerate(chosen):
        if not _play(crew, f"transfers, round {turn + 1}", pairs, message_bytes, found):
            return
    crew.board.exchange("links", None, lambda _: judge_links(report, found, settings.min_ratio,
                                                             settings.min_gbit_per_s))


def _play(crew: Crew, phase: str, pairs: list[tuple[int, int]], message_bytes: int,
          found: dict[tuple[str, str], list[Link]]) -> bool:
    """One round: these pairs of hosts at the same time. Whether all transfers came to an end."""
    names, rank = list(crew.hosts), crew.world.rank
    pair_of = {names[place]: (names[a], names[b]) for a, b in pairs for place in (a, b)}
    partner = partner_of(rank, pairs, list(crew.hosts.values()))

    def keep(links: list[Link | None]) -> None:
        for other, link in enumerate(links):
            if link is not None:
                found.setdefault(pair_of[crew.host_of(other)], []).append(link)

    return crew.together(phase, lambda: None if partner is None else measure_link(rank, partner, message_bytes), keep,
                         lambda other: " and ".join(pair_of.get(crew.host_of(other), (crew.host_of(other),))))


def _collectives(message_bytes: int, hosts: list[list[int]]) -> dict[str, Collective]:
    """By name; `inside` only where some host has several ranks."""
    found = {"all-reduce": all_reduce(message_bytes), "all-gather": all_gather(message_bytes)}
    if len(hosts) > 1 and max(map(len, hosts)) > 1:
        group, _ = dist.new_subgroups_by_enumeration(hosts)
        found["inside"] = all_reduce(message_bytes, group)
    return found
