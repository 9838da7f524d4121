"""Measure the network: TCP connections and clocks between hosts, collectives, and transfers between pairs of hosts."""

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.distributed.tcp_store import is_numeric

CONNECT_TIMEOUT_S = 5.0
_ATTEMPTS = 3  # the fastest attempt gives the most accurate clock difference
_THREADS = 16
_REPETITIONS = 3
_PINGS = 20


@dataclass(frozen=True)
class ConnectionResult:
    """Result of a connection attempt from one host to another."""

    round_trip_s: float = 0.0  # time to open a connection and receive 8 bytes
    clock_offset_s: float = 0.0  # the other host's clock minus this host's
    error: str = ""  # why the connection failed; "": it succeeded


class ClockServer:
    """Server thread that sends this host's time to every client, until `close` is called.

    It listens on `address`, or on all addresses if `address` is a name: other hosts may resolve it differently.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        is_name = not is_numeric(address)
        dual = is_name and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
        self._socket = socket.create_server(("" if is_name else address, 0), family=family, backlog=1024,
                                            dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]
        self._clock = clock
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Send the time, as 8 bytes, to one client after another."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # the server was closed
            with connection:
                try:
                    connection.sendall(struct.pack("!d", self._clock()))
                except OSError:
                    continue

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()


def own_address(master: str) -> str:
    """Return this host's address on the network that leads to `master`, the host of rank 0. Raises OSError.

    On the host of rank 0, `master` may resolve to the loopback address. Then the result is the name `master`, which
    other hosts can resolve.
    """
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: this sends nothing
        found = str(probe.getsockname()[0])
    return master if found.startswith("127.") or found == "::1" else found


def measure_connection(address: tuple[str, int]) -> ConnectionResult:
    """Connect several times to the ClockServer at (address, port). Returns the fastest attempt or the first error."""
    found: list[ConnectionResult] = []
    for _ in range(_ATTEMPTS):
        try:
            start, tick = time.time(), time.perf_counter()
            with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as connection:
                answer = connection.recv(8, socket.MSG_WAITALL)
            round_trip = time.perf_counter() - tick
            (their_time,) = struct.unpack("!d", answer)
            if not math.isfinite(their_time):
                raise OSError("the answer is not a time")
        except (OSError, OverflowError, struct.error) as error:  # OverflowError: not a port
            return ConnectionResult(error=f"{address[0]}: {error}")
        found.append(ConnectionResult(round_trip, their_time - (start + round_trip / 2)))
    return min(found, key=lambda result: result.round_trip_s)


def measure_connections(addresses: dict[str, tuple[str, int]]) -> dict[str, ConnectionResult]:
    """Call `measure_connection` for each host, for up to 16 hosts in parallel. Returns host -> result."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(addresses, pool.map(measure_connection, addresses.values()), strict=True))


def host_name() -> str:
    """Return SLURM's name of this host, or the host name outside SLURM."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class Link:
    """One rank's measurement with its partner rank on another host."""

    seconds: float  # time to send `num_bytes` in one direction, then in the other
    num_bytes: int  # size of one transfer
    latency_us: float  # half the round-trip time of 4 bytes
    corrupted: bool  # whether the received bytes differ from the sent bytes


@dataclass(frozen=True)
class Collective:
    """One rank's measurement of a collective."""

    gb_per_s: float  # bus bandwidth, which is comparable between different numbers of ranks
    latency_us: float  # time of a collective with a single element
    wrong: bool  # whether this rank got a wrong result


def round_robin(count: int) -> list[list[tuple[int, int]]]:
    """Return a round-robin schedule: rounds of pairs of hosts (by index). No host occurs twice in a round.

    Each pair of the `count` hosts occurs in one round.
    """
    hosts: list[int | None] = list(range(count))
    if count % 2:
        hosts.append(None)  # the host paired with None pauses
    size, rounds = len(hosts), []
    for _ in range(size - 1):
        pairs = zip(hosts[:size // 2], reversed(hosts[size // 2:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        hosts = [hosts[0], hosts[-1], *hosts[1:-1]]
    return [pairs for pairs in rounds if pairs]


def choose_evenly(rounds: list[list[tuple[int, int]]], limit: int) -> list[list[tuple[int, int]]]:
    """Return `limit` evenly spaced rounds, or all rounds if `limit` is 0 or not below their number."""
    if limit == 0 or limit >= len(rounds):
        return rounds
    return [rounds[i * len(rounds) // limit] for i in range(limit)]


def partner_of(rank: int, pairs: list[tuple[int, int]], hosts: list[list[int]]) -> int | None:
    """Return the partner rank of `rank`: rank number n of a host is paired with rank number n of the other host.

    Returns None if there is no such rank, or if the host is in none of the `pairs`. `hosts`: ranks of each host.
    """
    (own_host,) = (i for i, ranks in enumerate(hosts) if rank in ranks)
    for pair in pairs:
        if own_host in pair:
            other_ranks = hosts[pair[0] if pair[1] == own_host else pair[1]]
            index = hosts[own_host].index(rank)
            return other_ranks[index] if index < len(other_ranks) else None
    return None


def measure_link(rank: int, partner: int, num_bytes: int) -> Link:
    """Send `num_bytes` to the partner and receive them back, several times. Both ranks must call this.

    Both ranks measure nearly the same times.
    """
    device = get_accelerator().current_device_name()
    sent = torch.arange(251, dtype=torch.uint8, device=device).repeat(num_bytes // 251 + 1)[:num_bytes]
    received = torch.zeros_like(sent)
    small = torch.zeros(1, device=device)
    _there_and_back(rank, partner, sent, received)  # the first transfer opens the connection
    times = [_timed(lambda: _there_and_back(rank, partner, sent, received)) for _ in range(_REPETITIONS)]
    pings = [_timed(lambda: _there_and_back(rank, partner, small, small)) for _ in range(_PINGS)]
    return Link(median(times), num_bytes, median(pings) / 2 * 1e6, not torch.equal(sent, received))


def _there_and_back(rank: int, partner: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Transfer `sent` from the lower rank to the higher rank, which sends the received data back."""
    if rank < partner:
        dist.send(sent, partner)
        dist.recv(received, partner)
    else:
        dist.recv(received, partner)
        dist.send(received, partner)
    get_accelerator().synchronize()


def _timed(action: Callable[[], None]) -> float:
    """Return the seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def all_reduce(num_bytes: int, group: dist.ProcessGroup | None = None) -> Collective:
    """Measure an all-reduce of `num_bytes` among all ranks, or among the ranks of `group`. All ranks must call this."""
    device, size = get_accelerator().current_device_name(), dist.get_world_size(group)
    large, small = (torch.zeros(max(count, 1), device=device) for count in (num_bytes // 4, 1))
    latency = _median_time(lambda: dist.all_reduce(small, group=group), _PINGS)
    seconds = _median_time(lambda: dist.all_reduce(large, group=group), _REPETITIONS)
    large.fill_(1)
    dist.all_reduce(large, group=group)
    wrong = not bool((large == size).all())
    return Collective(num_bytes / seconds * 2 * (size - 1) / size / 1e9, latency * 1e6, wrong)


def all_gather(num_bytes: int) -> Collective:
    """Measure an all-gather among all ranks, with a result of `num_bytes`. All ranks must call this."""
    device, rank, size = get_accelerator().current_device_name(), dist.get_rank(), dist.get_world_size()
    count = max(num_bytes // 4 // size, 1)

    def timed(length: int, repetitions: int) -> tuple[float, list[torch.Tensor]]:
        own = torch.full((length,), float(rank), device=device)
        parts = [torch.full_like(own, -1.0) for _ in range(size)]
        return _median_time(lambda: dist.all_gather(parts, own), repetitions), parts

    latency, _ = timed(1, _PINGS)
    seconds, parts = timed(count, _REPETITIONS)
    wrong = not all(bool((part == i).all()) for i, part in enumerate(parts))
    return Collective(4 * count * (size - 1) / seconds / 1e9, latency * 1e6, wrong)


def _median_time(action: Callable[[], object], repetitions: int) -> float:
    """Return the median time in seconds of `action`, from a common start of all ranks until the device has finished."""
    times, token = [], torch.zeros(1, device=get_accelerator().current_device_name())
    for _ in range(repetitions + 1):
        dist.all_reduce(token)  # aligns the ranks; NCCL's barrier() would guess the device
        get_accelerator().synchronize()
        start = time.perf_counter()
        action()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])
