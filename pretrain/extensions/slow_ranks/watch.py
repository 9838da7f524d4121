"""Watch the times of all ranks on rank 0: rows of rank_times.jsonl, events and lines for slow ranks and links.

A slow link makes all ranks wait for longer, and is in no rank's own time. The shortest of the ranks' waiting times has
no waiting for a slow rank, only for transfers. If it grows for long, the ranks measure some links in the next logged
steps, as they did at the start of the run: how long a message of 256 KiB takes to another rank and back. A host all of
whose links to other hosts are slow, and still are 16 blocks later, is named.
"""

import math
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from pretrain.callback import Callback, Run
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import gather
from pretrain.engine.attachments import attachments
from pretrain.engine.parallelism import rank_order
from pretrain.extensions.slow_ranks.change import LINK, SLOW_RANK, Change, Place
from pretrain.extensions.slow_ranks.own_times import OwnTimes
from pretrain.extensions.slow_ranks.rank_times import RankTimes, RankTimesLog, rank_times
from pretrain.extensions.slow_ranks.slow_ranks import BLOCK_S, LEFT_OUT, SMALLEST_COST, Blocks, SlowRanks, peers_of
from pretrain.extensions.slow_ranks.statistics import WINDOW, lower_median
from pretrain.model.partition import layer_costs, stage_bounds
from pretrain.monitor.noise import change_point
from pretrain.monitor.training_row import Interval

Seconds = Mapping[tuple[int, int], float]  # pair of ranks -> of a message there and back
_PROBES = 3  # logged steps in which links are measured, one after another; the shortest times count
_PAUSE_S = 300.0  # pause of training, after which links are measured again
_MORE = 1.25  # ratio of the waiting times that is a reason to measure links
_SLOW_RATIO = 3.0  # ratio of the times of a link; busy CPUs make them longer too
_SLOWER_S = 1e-3
MESSAGE_BYTES = 256 * 1024
_REPETITIONS = 5
_LONGEST_S = 0.3  # time of a pair after the first repetition, which may wait for the other rank


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


class SlowRankWatch(Callback):
    """Writes the times of the ranks, and reports which ranks are slow."""

    order = 60

    def start(self, run: Run) -> None:
        """Learn where the ranks are, and measure their times from now on; collective."""
        timers = attachments(run.engine).phase_timers
        assert timers is not None  # a run that trains has them
        self._own_times = OwnTimes(timers)
        run.meter.timers.append(self._own_times)
        plan, folder, device = run.plan, run.folder, run.engine.device
        self._folder, self._screen = folder, run.screen
        hosts, order = gather(socket.gethostname()), rank_order(plan.layout)
        coordinates = [order.coordinates(rank) for rank in range(len(hosts))]
        self._log = RankTimesLog(folder.path, hosts, coordinates, first_step=run.first_step)
        self._places = [Place(host, place["pipeline"]) for host, place in zip(hosts, coordinates, strict=True)]
        self._links, self._device = SlowLinks(self._places), device
        self._slow = SlowRanks(self._places, on_cpu=get_accelerator().device_name() == "cpu",
                               stage_work=_stage_work(plan))

    def begin_step(self, run: Run) -> None:
        self._own_times.begin_data()

    def before_step(self, run: Run, micro_batches: list[MicroBatch]) -> None:
        self._own_times.end_data()

    def rank_values(self, run: Run) -> Sequence[float]:
        """Return whether this rank wants all ranks to measure their links now, which only rank 0 does; its times."""
        interval, self._is_partial = _interval_of(run), self._own_times.is_partial
        return [float(self._links.wants_probe),
                *self._own_times.take(interval.steps, data_seconds=interval.data_seconds)]

    def row_values(self, run: Run, ranks: np.ndarray) -> dict[str, Any]:
        """Return the keys of the slowest rank."""
        interval, self._probes = _interval_of(run), bool(ranks[0, 0])
        self._times = rank_times(ranks[:, 1:], step=interval.step, steps=interval.steps,
                                 step_ms=interval.step_seconds * 1e3, is_partial=self._is_partial)
        if len(self._places) == 1:
            return {"slowest_rank": None, "slowest_rank_ratio": None}
        own = self._times.ms["own"]
        ratios = np.array([own[rank] / max(float(np.median(own[peers])), 1e-9)
                           for rank, peers in enumerate(peers_of(self._places))])
        slowest = int(ratios.argmax())
        return {"slowest_rank": slowest, "slowest_rank_ratio": float(ratios[slowest])}

    def after_row(self, run: Run, row: Mapping[str, Any]) -> None:
        if "split" in row:
            return
        self._observe(self._times, expert_load=row.get("expert_load_max") or 1.0)
        if self._probes:
            with run.meter.outside_steps("probe"):
                self._probe()

    def _probe(self) -> None:
        """Measure links between the ranks, and report slow ones. Collective."""
        seconds = probe_links(self._device)
        if self._folder.is_active:
            self._report(self._links.add_probe(seconds))

    def _observe(self, times: RankTimes, *, expert_load: float) -> None:
        """Add the times of a logged step. `expert_load`: of the busiest expert, relative to the mean."""
        if times.is_partial:
            self._slow.leave_out_next()
        if len(self._places) == 1 or not self._folder.is_active:
            return
        for row in self._log.rows(times):
            self._folder.append("rank_times.jsonl", row)
        self._links.observe(times)
        self._report(self._slow.observe(times, imbalance=expert_load))

    def _report(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._screen.line(f"{change.event}: {change}")
            self._folder.event(change.event, reason=str(change), **change.record())


def _interval_of(run: Run) -> Interval:
    """Return the steps of the row that is being made."""
    assert run.meter.interval is not None
    return run.meter.interval


def _stage_work(plan: Plan) -> list[float]:
    """Return what each pipeline stage computes: FLOPs, or the times of its layers if they were measured."""
    layout, layers = plan.layout, layer_costs(plan.model, plan.args.seq_length)
    costs = layout.layer_times or [layer.work for layer in layers]
    bounds = stage_bounds(layers, num_stages=layout.pipeline_stages, method=layout.partition_method,
                          times=layout.layer_times)
    return [float(sum(costs[start:end])) for start, end in pairwise(bounds)]
