"""Rank 0's watch over the times of all ranks: rows of rank_times.jsonl, events and lines for slow ranks and links."""

import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from deepspeed.accelerator import get_accelerator

from pretrain.callback import Callback, Run
from pretrain.config.plan import Plan
from pretrain.distributed.collectives import gather
from pretrain.distributed.link_probe import probe_links
from pretrain.engine.parallelism import rank_order
from pretrain.model.partition import layer_costs, stage_bounds
from pretrain.monitor.rank_times import RankTimes, RankTimesLog
from pretrain.monitor.slow_links import SlowLinks
from pretrain.monitor.slow_rank_event import Change, Place
from pretrain.monitor.slow_ranks import SlowRanks, peers_of


class SlowRankWatch(Callback):
    """Writes the times of the ranks, and reports which ranks are slow."""

    order = 60

    def start(self, run: Run) -> None:
        """Learn where the ranks are; collective."""
        plan, folder, device = run.plan, run.folder, run.engine.device
        self._folder, self._screen = folder, run.screen
        hosts, order = gather(socket.gethostname()), rank_order(plan.layout)
        coordinates = [order.coordinates(rank) for rank in range(len(hosts))]
        self._log = RankTimesLog(folder.path, hosts, coordinates, first_step=run.first_step)
        self._places = [Place(host, place["pipeline"]) for host, place in zip(hosts, coordinates, strict=True)]
        self._links, self._device = SlowLinks(self._places), device
        self._slow = SlowRanks(self._places, on_cpu=get_accelerator().device_name() == "cpu",
                               stage_work=_stage_work(plan))

    def rank_values(self, run: Run) -> Sequence[float]:
        """Return whether this rank wants all ranks to measure their links now; only rank 0 does."""
        return [float(self._links.wants_probe)]

    def row_values(self, run: Run, ranks: np.ndarray) -> dict[str, Any]:
        """Return the keys of the slowest rank."""
        self._probes = bool(ranks[0, 0])
        if len(self._places) == 1:
            return {"slowest_rank": None, "slowest_rank_ratio": None}
        own = _times_of(run).ms["own"]
        ratios = np.array([own[rank] / max(float(np.median(own[peers])), 1e-9)
                           for rank, peers in enumerate(peers_of(self._places))])
        slowest = int(ratios.argmax())
        return {"slowest_rank": slowest, "slowest_rank_ratio": float(ratios[slowest])}

    def after_row(self, run: Run, row: Mapping[str, Any]) -> None:
        if "split" in row:
            return
        self._observe(_times_of(run), expert_load=row.get("expert_load_max") or 1.0)
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
            self._folder.rank_times(row)
        self._links.observe(times)
        self._report(self._slow.observe(times, imbalance=expert_load))

    def _report(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._screen.line(f"{change.event}: {change}")
            self._folder.event(change.event, reason=str(change), **change.record())


def _times_of(run: Run) -> RankTimes:
    """Return the times of the newest row."""
    times = run.meter.rank_times
    assert times is not None  # a row is being made
    return times


def _stage_work(plan: Plan) -> list[float]:
    """Return what each pipeline stage computes: FLOPs, or the times of its layers if they were measured."""
    layout, layers = plan.layout, layer_costs(plan.model, plan.args.seq_length)
    costs = layout.layer_times or [layer.work for layer in layers]
    bounds = stage_bounds(layers, num_stages=layout.pipeline_stages, method=layout.partition_method,
                          times=layout.layer_times)
    return [float(sum(costs[start:end])) for start, end in pairwise(bounds)]
