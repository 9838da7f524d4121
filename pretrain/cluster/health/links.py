"""Transfers between ranks: collectives, and point to point between every pair of hosts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

_REPETITIONS = 3
_PINGS = 20


@dataclass(frozen=True)
class Link:
    """What one rank measured with its partner on another host, both directions together."""

    seconds: float  # for `num_bytes` there and as many back
    num_bytes: int
    latency_us: float  # one way
    changed: bool  # the bytes that came back are not those that went


@dataclass(frozen=True)
class Collective:
    """One kind of collective."""

    gb_per_s: float  # bus bandwidth: what each rank's link carries, whatever the number of ranks
    latency_us: float  # of a single number
    wrong: bool  # this rank got another result than it must


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` players once, in rounds in which nobody plays twice: a round-robin tournament."""
    players: list[int | None] = list(range(count))
    if count % 2:
        players.append(None)  # whoever meets it rests
    size, found = len(players), []
    for _ in range(size - 1):
        meetings = zip(players[:size // 2], reversed(players[size // 2:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return [each for each in found if each]


def spread(items: list[list[tuple[int, int]]], limit: int) -> list[list[tuple[int, int]]]:
    """`limit` of the rounds, evenly chosen; all of them for 0 or where there are not as many."""
    if limit == 0 or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def partner_of(rank: int, pairs: list[tuple[int, int]], hosts: list[list[int]]) -> int | None:
    """The rank to measure with: the nth rank of one host with the nth of the other; None: this rank rests."""
    (mine,) = (i for i, ranks in enumerate(hosts) if rank in ranks)
    for pair in pairs:
        if mine in pair:
            other = hosts[pair[0] if pair[1] == mine else pair[1]]
            place = hosts[mine].index(rank)
            return other[place] if place < len(other) else None
    return None


def measure_link(rank: int, partner: int, num_bytes: int) -> Link:
    """Send there and back; both ranks call this, and both get what the lower one measured or close to it."""
    device = get_accelerator().current_device_name()
    sent = torch.arange(251, dtype=torch.uint8, device=device).repeat(num_bytes // 251 + 1)[:num_bytes]
    received = torch.zeros_like(sent)
    small = torch.zeros(1, device=device)
    _there_and_back(rank, partner, sent, received)  # the first one opens the connection
    times = [_timed(lambda: _there_and_back(rank, partner, sent, received)) for _ in range(_REPETITIONS)]
    pings = [_timed(lambda: _there_and_back(rank, partner, small, small)) for _ in range(_PINGS)]
    return Link(median(times), num_bytes, median(pings) / 2 * 1e6, not torch.equal(sent, received))


def _there_and_back(rank: int, partner: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    if rank < partner:
        dist.send(sent, partner)
        dist.recv(received, partner)
    else:
        dist.recv(received, partner)
        dist.send(received, partner)
    get_accelerator().synchronize()


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def all_reduce(num_bytes: int, group: dist.ProcessGroup | None = None) -> Collective:
    """Of all ranks, or of those in `group`; all ranks call this at once."""
    device, size = get_accelerator().current_device_name(), dist.get_world_size(group)
    large, small = (torch.zeros(max(count, 1), device=device) for count in (num_bytes // 4, 1))
    latency = _median_time(lambda: dist.all_reduce(small, group=group), _PINGS)
    seconds = _median_time(lambda: dist.all_reduce(large, group=group), _REPETITIONS)
    large.fill_(1)
    dist.all_reduce(large, group=group)
    wrong = not bool((large == size).all())
    return Collective(num_bytes / seconds * 2 * (size - 1) / size / 1e9, latency * 1e6, wrong)


def all_gather(num_bytes: int) -> Collective:
    """Of all ranks, to `num_bytes` together."""
    device, rank, size = get_accelerator().current_device_name(), dist.get_rank(), dist.get_world_size()
    count = max(num_bytes // 4 // size, 1)

    def timed(length: int, repetitions: int) -> tuple[float, list[torch.Tensor]]:
        mine = torch.full((length,), float(rank), device=device)
        parts = [torch.full_like(mine, -1.0) for _ in range(size)]
        return _median_time(lambda: dist.all_gather(parts, mine), repetitions), parts

    latency, _ = timed(1, _PINGS)
    seconds, parts = timed(count, _REPETITIONS)
    wrong = not all(bool((part == i).all()) for i, part in enumerate(parts))
    return Collective(4 * count * (size - 1) / seconds / 1e9, latency * 1e6, wrong)


def _median_time(action: Callable[[], object], repetitions: int) -> float:
    """Seconds, from a common start, until the device is done."""
    times, token = [], torch.zeros(1, device=get_accelerator().current_device_name())
    for _ in range(repetitions + 1):
        dist.all_reduce(token)  # NCCL's barrier would guess the device
        get_accelerator().synchronize()
        start = time.perf_counter()
        action()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])
