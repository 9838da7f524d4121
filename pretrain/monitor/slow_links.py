"""Find the hosts whose network link has become slow.

A slow link makes all ranks wait for longer, and is in no rank's own time. The shortest of the ranks' waiting times has
no waiting for a slow rank, only for transfers. If it grows for long, the ranks measure some links in the next logged
steps (link_probe.py), as they did at the start of the run. A host all of whose links to other hosts are slow, and still
are 16 blocks later, is named.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pretrain.distributed.link_probe import MESSAGE_BYTES
from pretrain.monitor.expected.band import change_point
from pretrain.monitor.rank_times import RankTimes
from pretrain.monitor.slow_kinds import LINK
from pretrain.monitor.slow_rank_event import SLOW_RANK, Change, Place
from pretrain.monitor.slow_ranks import BLOCK_S, LEFT_OUT, SMALLEST_COST, Blocks
from pretrain.monitor.slow_statistics import WINDOW, lower_median

Seconds = Mapping[tuple[int, int], float]  # pair of ranks -> of a message there and back
_PROBES = 3  # logged steps in which links are measured, one after another; the shortest times count
_PAUSE_S = 300.0  # of training, after which links are measured again
_MORE = 1.25  # ratio of the waiting times that is a reason to measure links
_SLOW_RATIO = 3.0  # of the times of a link; busy CPUs make them longer too
_SLOWER_S = 1e-3


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
