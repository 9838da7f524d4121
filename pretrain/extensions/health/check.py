"""Run the cluster health check: every rank measures its device, disk, clock and links; rank 0 evaluates the results.

Rank 0 reports two kinds of findings. An outlier is a measurement below a fraction of the median (`report.py`). A
fault is a wrong matrix product, a corrupted byte, a full disk, a wrong clock or a silent rank.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.checkpoint.load.resume import checkpoints_folder
from pretrain.checkpoint.load.start import check_start
from pretrain.checkpoint.save.commit import next_checkpoint_bytes
from pretrain.distributed.device import detect_device
from pretrain.distributed.key_value_store import (
    RankStore,
    SilentRanksError,
    connect_store,
    first_line,
    run_with_timeout,
)
from pretrain.distributed.process import port_is_free
from pretrain.distributed.process_group import all_ranks_here, init_process_group, taken_port
from pretrain.distributed.world import World
from pretrain.engine.build import deepspeed_output
from pretrain.errors import ConfigError
from pretrain.extensions.health.devices import DeviceHealth, DiskHealth, device_health, disk_health
from pretrain.extensions.health.findings import (
    report_collectives,
    report_connections,
    report_devices,
    report_disks,
    report_links,
)
from pretrain.extensions.health.network import (
    ClockServer,
    Collective,
    ConnectionResult,
    Link,
    all_gather,
    all_reduce,
    choose_evenly,
    host_name,
    measure_connections,
    measure_link,
    own_address,
    partner_of,
    round_robin,
)
from pretrain.extensions.health.report import ClusterCheckSettings, ClusterReport, Finding

T = TypeVar("T")
_START_TIMEOUT_FACTOR = 2.0  # ranks may start within this times the time-out: torch loads slowly from a cold disk


@dataclass(frozen=True)
class RankLocation:
    """The host of a rank, and the address and port of the rank's clock server."""

    host: str
    local_rank: int
    address: str
    port: int


@dataclass(frozen=True)
class RankResult(Generic[T]):
    """Result of one rank's measurement. If `error` is set, `value` is None."""

    value: T | None = None
    error: str = ""
    is_rejection: bool = False  # whether the error is bad input, which ends the check


@dataclass(frozen=True)
class CheckContext:
    """The objects that all phases of the check need."""

    store: RankStore
    world: World
    settings: ClusterCheckSettings
    hosts: dict[str, list[int]]  # host -> its ranks
    host_of: dict[int, str]  # rank -> its host
    report: ClusterReport  # rank 0 adds the measurements and findings

    def run_phase(self, phase: str, kind: Any, measure: Callable[[], T], evaluate: Callable[[list[T]], None],
                  name_of: Callable[[int], str] | None = None) -> bool:
        """Run `measure` on every rank, then `evaluate` on rank 0. Returns whether all ranks succeeded in time.

        Raises SilentRanksError. If `measure` raises ConfigError on one rank, all ranks raise it.

        Args:
            phase: name of the phase, for findings.
            kind: type of a measurement.
            measure: returns this rank's measurement.
            evaluate: gets the measurements of all ranks in rank order, if none failed.
            name_of: returns the host or hosts of a rank, for findings about its failure (default: its host).
        """
        start = time.monotonic()
        result = _measure_with_timeout(partial(self._on_device, measure), self.settings.timeout_s)

        def evaluate_all(results: list[RankResult[T]]) -> tuple[bool, str]:
            """Return (whether all ranks succeeded, the line of a ConfigError that a rank raised)."""
            errors = {rank: each for rank, each in enumerate(results) if each.error}
            for rank, each in errors.items():
                if each.is_rejection:
                    return False, f"{self.host_of[rank]}: {each.error}"
                self.report.add((name_of or self.host_of.__getitem__)(rank), f"{phase}: {each.error}")
            if not errors:
                evaluate([cast(T, each.value) for each in results])
            return not errors, ""

        # All ranks began the phase at the same time, so all have the same time left.
        left_s = max(self.settings.timeout_s - (time.monotonic() - start), 0)
        kinds = (cast(Any, RankResult)[kind], tuple[bool, str])
        succeeded, rejection = self.store.exchange(phase, result, evaluate_all, kinds=kinds, wait_s=left_s)
        if rejection:
            raise ConfigError.from_line(rejection)
        return succeeded

    def _on_device(self, measure: Callable[[], T]) -> T:
        get_accelerator().set_device(self.world.local_rank)  # each thread has a current device of its own
        return measure()


def _measure_with_timeout(measure: Callable[[], T], timeout_s: float) -> RankResult[T]:
    """Run `measure`. A failure or a time-out becomes the result's `error`."""
    try:
        return RankResult(run_with_timeout(measure, timeout_s))
    except ConfigError as error:
        return RankResult(error=str(error), is_rejection=True)
    except Exception as error:  # any failure of a measurement is a finding about this host
        return RankResult(error=first_line(error))


def check_cluster(settings: ClusterCheckSettings, world: World) -> ClusterReport:
    """Run the check; all ranks must call this. Rank 0 returns the full report, the other ranks only its findings.

    Raises ConfigError on every rank for bad input, and ConnectionError if this rank cannot reach rank 0.
    """
    store = _connect(world, settings.timeout_s)
    address = own_address(os.environ["MASTER_ADDR"])
    report, server = ClusterReport(ranks=world.size), ClockServer(address)
    hosts: dict[str, list[int]] = {}
    silent: list[int] = []
    try:
        location = RankLocation(host_name(), world.local_rank, address, server.port)
        locations = store.exchange("start", location, list, kinds=(RankLocation, list[RankLocation]),
                                   wait_s=_START_TIMEOUT_FACTOR * settings.timeout_s)
        hosts = ranks_by_host(locations)
        host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
        context = CheckContext(store, world, settings, hosts, host_of, report)
        report.hosts = {host: {} for host in hosts}
        _measure(context, {host: (locations[ranks[0]].address, locations[ranks[0]].port)
                           for host, ranks in hosts.items()})
        report.findings = store.exchange("findings", None, lambda _: report.findings, kinds=(None, list[Finding]))
    except SilentRanksError as error:
        silent = error.ranks
        _report_silent_ranks(report, error, hosts)
    finally:
        store.leave(silent)
        server.close()
    return report


def _connect(world: World, timeout_s: float) -> RankStore:
    """Connect to the store at MASTER_ADDR:MASTER_PORT. The process group will use the same store.

    Raises ConnectionError, and ConfigError if another program listens on the port.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    runs_server = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun runs one
    if runs_server and not port_is_free(port):
        raise taken_port(world)
    try:
        return connect_store(address, port, "check_cluster", rank=world.rank, size=world.size, runs_server=runs_server,
                             on_one_host=all_ranks_here(world, os.environ), timeout_s=timeout_s,
                             start_s=_START_TIMEOUT_FACTOR * timeout_s)
    except (RuntimeError, OSError) as error:
        raise ConnectionError(f"no connection to rank 0 at {address}:{port} ({first_line(error)}). Check that rank 0 "
                              "has started and that this is its address") from None


def _report_silent_ranks(report: ClusterReport, error: SilentRanksError, hosts: dict[str, list[int]]) -> None:
    """Add a finding for each silent rank. If ranks never started, their hosts are unknown; name the other hosts."""
    known = sorted({location.host for location in error.received.values() if isinstance(location, RankLocation)})
    for rank in error.ranks:
        host = next((host for host, ranks in hosts.items() if rank in ranks), f"rank {rank}")
        others = "" if hosts else f"; other ranks started on {', '.join(known)}"
        report.add(host, f"rank {rank} of {report.ranks} did not answer for {error.waited_s:.0f} s "
                         f"({error.phase}){others}")


def ranks_by_host(locations: list[RankLocation]) -> dict[str, list[int]]:
    """Return host -> its ranks, in rank order. Hosts with equal names become `name`, `name#2`, ..."""
    hosts: dict[str, list[int]] = {}
    counts: dict[tuple[str, int], int] = {}
    for rank, location in enumerate(locations):
        key = location.host, location.local_rank  # unique on one host: the second one is on another host of this name
        counts[key] = counts.get(key, 0) + 1
        name = location.host if counts[key] == 1 else f"{location.host}#{counts[key]}"
        hosts.setdefault(name, []).append(rank)
    return hosts


def _measure(context: CheckContext, addresses: dict[str, tuple[str, int]]) -> None:
    """Run all phases. Transfers are not measured if a device failed or hosts cannot connect to each other.

    `addresses`: host -> (address, port) of the clock server of its first rank.
    """
    settings, report = context.settings, context.report
    own_host = context.host_of[context.world.rank]
    is_first = context.hosts[own_host][0] == context.world.rank  # first rank of its host
    others = {host: address for host, address in addresses.items() if host != own_host}

    def connections() -> dict[str, ConnectionResult]:
        return measure_connections(others) if is_first else {}

    context.run_phase("connections", dict[str, ConnectionResult], connections,
                      partial(report_connections, report, context.hosts, settings.max_clock_skew_s))
    context.run_phase("disk", DiskHealth | None, lambda: _disk(context) if is_first else None,
                      partial(report_disks, report, context.hosts, settings.min_ratio))
    on_cpu = get_accelerator().device_name() == "cpu"
    size = settings.product_size or (1024 if on_cpu else 8192)
    devices_work = context.run_phase("device", DeviceHealth, lambda: device_health(size, settings.memory_bytes),
                                     partial(report_devices, report, context.hosts, settings.min_ratio))
    connected = context.store.exchange("connected", None, lambda _: not report.unreachable, kinds=(None, bool))
    if not (devices_work and connected):
        report.skipped = "no transfers were measured: some device failed, or some hosts cannot connect to each other"
        return
    _measure_links(context, settings.message_bytes or (2**24 if on_cpu else 2**28))


def _disk(context: CheckContext) -> DiskHealth:
    """Measure the disk. If the settings have a run, also validate it. Raises ConfigError if it is invalid here."""
    needed, run = 0, context.settings.run
    if run is not None:
        plan = check_start(run, world_size=context.world.size, device=detect_device()).plan
        needed = next_checkpoint_bytes(plan, checkpoints_folder(plan))
    return disk_health(context.settings.folder, context.settings.disk_bytes, needed)


def _measure_links(context: CheckContext, message_bytes: int) -> None:
    """Create the process group, then measure the collectives and the pairs of hosts, one round after another."""
    report, settings = context.report, context.settings
    if context.world.size == 1:
        return
    with deepspeed_output("error"):
        initialized = context.run_phase("process group", None, lambda: init_process_group(context.world),
                                        lambda _: None)
    if not initialized:
        return
    if not context.run_phase("collectives", dict[str, Collective],
                             lambda: _collectives(message_bytes, list(context.hosts.values())),
                             partial(report_collectives, report, context.hosts, settings.min_ratio)):
        return
    all_rounds = round_robin(len(context.hosts))
    chosen = choose_evenly(all_rounds, settings.rounds)
    report.rounds = (len(chosen), len(all_rounds))
    links: dict[tuple[str, str], list[Link]] = {}
    for number, pairs in enumerate(chosen, 1):
        if not _measure_round(context, f"transfers, round {number}", pairs, message_bytes, links):
            return
    context.store.exchange("links", None, kinds=(None, None), combine=lambda _: report_links(
        report, links, settings.min_ratio, settings.min_gbit_per_s))


def _measure_round(context: CheckContext, phase: str, pairs: list[tuple[int, int]], message_bytes: int,
                   links: dict[tuple[str, str], list[Link]]) -> bool:
    """Measure the given pairs of hosts at the same time, and add the results to `links` on rank 0.

    Returns whether all ranks succeeded in time.
    """
    names, rank = list(context.hosts), context.world.rank
    pair_of = {names[host]: (names[a], names[b]) for a, b in pairs for host in (a, b)}
    partner = partner_of(rank, pairs, list(context.hosts.values()))

    def add_links(results: list[Link | None]) -> None:
        for other, link in enumerate(results):
            if link is not None:
                links.setdefault(pair_of[context.host_of[other]], []).append(link)

    def name_of(other: int) -> str:
        host = context.host_of[other]
        return " and ".join(pair_of.get(host, (host,)))

    return context.run_phase(
        phase, Link | None, lambda: None if partner is None else measure_link(rank, partner, message_bytes), add_links,
        name_of)


def _collectives(message_bytes: int, hosts: list[list[int]]) -> dict[str, Collective]:
    """Measure the collectives. Returns name -> measurement.

    "inside" is the all-reduce among the ranks of one host. It is measured if there are several hosts, and some host
    has several ranks.
    """
    found = {"all-reduce": all_reduce(message_bytes), "all-gather": all_gather(message_bytes)}
    if len(hosts) > 1 and max(map(len, hosts)) > 1:
        group, _ = dist.new_subgroups_by_enumeration(hosts)
        found["inside"] = all_reduce(message_bytes, group)
    return found
