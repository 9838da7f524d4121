"""Find the hosts whose network link has become slow.

A slow link makes all ranks wait for longer, and is in no rank's own time. The shortest of the ranks' waiting times has
no waiting for a slow rank, only for transfers. If it grows for long, the ranks measure some links in the next logged
steps, as they did at the start of the run: how long a message of 256 KiB takes to another rank and back. A host all of
whose links to other hosts are slow, and still are 16 blocks later, is named.
"""

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.extensions.slow_ranks.change import LINK, SLOW_RANK, Change, Place
from pretrain.extensions.slow_ranks.rank_times import RankTimes
from pretrain.extensions.slow_ranks.slow_ranks import BLOCK_S, LEFT_OUT, SMALLEST_COST, Blocks
from pretrain.extensions.slow_ranks.statistics import WINDOW, lower_median
from pretrain.monitor.noise import change_point

Seconds = Mapping[tuple[int, int], float]  # pair of ranks -> of a message there and back
_PROBES = 3  # logged steps in which links are measured, one after another; the shortest times count
_PAUSE_S = 300.0  # of training, after which links are measured again
_MORE = 1.25  # ratio of the waiting times that is a reason to measure links
_SLOW_RATIO = 3.0  # of the times of a link; busy CPUs make them longer too
_SLOWER_S = 1e-3
MESSAGE_BYTES = 256 * 1024
_REPETITIONS = 5
_LONGEST_S = 0.3  # of a pair after the first repetition, which may wait for the other rank


class SlowLinks:
    """Decides when links are measured, and reports those that have become slow, or are no longer slow.

    Args:
        block_s: seconds of training that are joined to one block.
    """

    def __init__(self, places: Sequence[Place], *, block_s: float = BLOCK_S) -> None:
        self._places, self._has_links = list(places), len({place.host for place in places}) > 1
        self._blocks = Blocks(block_s)
        self._rows, self._trained_s, self._next_s = 0, 0.0, 0.0
        self._probes: list[Seconds] = []
        self._first: Seconds = {}  # at the start of the run
        self._found: list[int] = []  # ranks with slow links, when they were measured last
        self._slow: Change | None = None
        self.wants_probe = False  # in the next logged step

    def observe(self, times: RankTimes) -> None:
        """Add a row. May set `wants_probe`, if there are several hosts."""
        if not self._has_links:
            return
        self._rows += 1
        self._trained_s += times.steps * times.step_ms / 1e3
        if self._rows <= LEFT_OUT:
            return
        is_block = self._blocks.add(times)
        is_due = is_block and self._trained_s >= self._next_s
        if not self._first or (is_due and (self._found or self._is_suspicious())):
            self.wants_probe = True

    def _waits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the shortest waiting time of each block, and the time of a step: in ms."""
        blocks = self._blocks.blocks
        waits = np.array([block.ms["reduce_wait"].min() for block in blocks])
        return waits, np.array([block.step_ms for block in blocks])

    def _is_suspicious(self) -> bool:
        waits, steps = self._waits()
        if len(waits) < 2 * WINDOW:
            return False
        # the lower quartile: on a busy machine, other programs make some of the earlier waits longer
        now, before = np.median(waits[-WINDOW:]), np.quantile(waits[:-WINDOW], 0.25)
        return bool(now > _MORE * before and now - before > SMALLEST_COST * np.median(steps[-WINDOW:]))

    def add_probe(self, seconds: Seconds) -> list[Change]:
        """Add measured links. Returns what is to be reported."""
        self._probes.append(seconds)
        if len(self._probes) < _PROBES:
            return []
        shortest = {pair: min(probe[pair] for probe in self._probes) for pair in seconds}
        self._probes, self.wants_probe = [], False
        if not self._first:
            self._first = shortest
            return []
        found = slow_links(shortest, self._first, self._places)
        ranks, before, was_slow = found[0] if found else [], self._found, self._slow
        self._found, self._next_s = ranks, self._trained_s + _PAUSE_S
        if was_slow is not None:
            self._slow = was_slow if found else None
            return [] if found else [was_slow.ended(self._blocks.blocks[-1].step)]
        if found is None:
            return []
        if ranks != before:  # busy CPUs make a link slow for some steps: measured again
            self._next_s = self._trained_s + WINDOW * self._blocks.seconds
            return []
        self._slow = self._report(*found)
        return [self._slow]

    def _report(self, ranks: list[int], slow_s: float, usual_s: float) -> Change:
        blocks, (waits, _) = list(self._blocks.blocks), self._waits()
        first = change_point(waits - np.median(waits[:-WINDOW]), WINDOW)
        more = np.median(waits[first:]) - np.median(waits[:first] if first else waits)
        since, step = blocks[first].step - blocks[first].steps + 1, blocks[-1].step
        hosts = sorted({self._places[rank].host for rank in ranks})
        text = f"{MESSAGE_BYTES >> 10} KiB to another host and back take {slow_s * 1e3:.1f} ms, usually or between " \
            f"other hosts {usual_s * 1e3:.1f} ms; all ranks wait {more:.0f} ms longer in a step"
        return Change(SLOW_RANK, ranks, hosts, None, True, LINK, slow_s / usual_s, since, step, step - since + 1, text)


def slow_links(seconds: Seconds, first: Seconds, places: Sequence[Place]) -> tuple[list[int], float, float] | None:
    """Return the ranks of hosts whose links are slow, and the median seconds of these links: now, and as usual.

    Only links between hosts count. A link is compared with what it was at the start (`first`), and with the median of
    the links now. A host is as slow as its best link. Hosts that are much less slow than the slowest one are noise of
    busy CPUs, and so are more than half of the hosts: of two, both are at the end of the slow links.
    """
    hosts = [place.host for place in places]
    pairs = [(a, b) for a, b in seconds if hosts[a] != hosts[b]]
    median = float(lower_median(np.array([seconds[pair] for pair in pairs])))
    usual = {pair: min(first.get(pair, math.inf), median) for pair in pairs}
    best: dict[str, float] = {}
    for pair in pairs:
        ratio = seconds[pair] / usual[pair] if seconds[pair] - usual[pair] > _SLOWER_S else 1.0
        best |= {hosts[rank]: min(best.get(hosts[rank], math.inf), ratio) for rank in pair}
    limit = max(_SLOW_RATIO, math.sqrt(max(best.values())))
    slow = {host for host, ratio in best.items() if ratio > limit}
    if not slow or len(slow) > max(2, len(best) // 2):
        return None
    shown = [(a, b) for a, b in pairs if {hosts[a], hosts[b]} & slow]
    return ([rank for rank, host in enumerate(hosts) if host in slow],
            float(np.median([seconds[pair] for pair in shown])), float(np.median([usual[pair] for pair in shown])))


def rounds_of(ranks: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks that exchange messages at the same time. A rank is in one pair of a round at most.

    They are neighbours in a ring, and ranks that are half of the ring apart, which are mostly on different hosts.
    """
    neighbours = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    half = ranks // 2
    rounds = [neighbours[:ranks - 1:2], neighbours[1::2] if ranks > 2 else [],
              [(rank, rank + half) for rank in range(half)] if ranks > 3 else []]
    return [pairs for pairs in rounds if pairs]


def probe_links(device: torch.device) -> dict[tuple[int, int], float]:
    """Return the seconds of each pair of ranks: the shortest of some repetitions. Collective; waits for the device."""
    rank, rounds = dist.get_rank(), rounds_of(dist.get_world_size())
    own = torch.zeros(len(rounds), dtype=torch.float64, device=device)
    message = torch.zeros(MESSAGE_BYTES // 4, device=device)
    for number, pairs in enumerate(rounds):
        for first, second in pairs:
            if rank == first:
                own[number] = _send(message, second)
            elif rank == second:
                _return(message, first)
    everyone = own.new_empty(dist.get_world_size(), len(rounds))
    dist.all_gather(list(everyone.unbind(0)), own)
    seconds = everyone.cpu().numpy()
    return {(first, second): float(seconds[first, number])
            for number, pairs in enumerate(rounds) for first, second in pairs}


def _send(message: torch.Tensor, other: int) -> float:
    """Send messages to another rank, which returns them. The first value of the last one is 1."""
    seconds: list[float] = []
    while not message[0]:
        message[0] = len(seconds) == _REPETITIONS - 1 or sum(seconds[1:]) > _LONGEST_S
        get_accelerator().synchronize()
        start = time.perf_counter()
        dist.send(message, other)
        dist.recv(message, other)
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
    message.zero_()
    return float(np.min(seconds))


def _return(message: torch.Tensor, other: int) -> None:
    while not message[0]:
        dist.recv(message, other)
        dist.send(message, other)
    message.zero_()
