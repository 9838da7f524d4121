"""Rank 0's watch over the times of all ranks: rows of rank_times.jsonl, events and lines for slow ranks and links."""

import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from deepspeed.accelerator import get_accelerator

from pretrain.callback import Callback, Run
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import gather
from pretrain.engine.attachments import attachments
from pretrain.engine.parallelism import rank_order
from pretrain.extensions.slow_ranks.change import Change, Place
from pretrain.extensions.slow_ranks.links import SlowLinks, probe_links
from pretrain.extensions.slow_ranks.own_times import OwnTimes
from pretrain.extensions.slow_ranks.rank_times import RankTimes, RankTimesLog, rank_times
from pretrain.extensions.slow_ranks.slow_ranks import SlowRanks, peers_of
from pretrain.model.partition import layer_costs, stage_bounds
from pretrain.monitor.training_row import Interval


class SlowRankWatch(Callback):
    """Writes the times of the ranks, and reports which ranks are slow."""

    order = 60

    def start(self, run: Run) -> None:
        """Learn where the ranks are, and measure their times from now on; collective."""
        timers = attachments(run.engine).phase_timers
        assert timers is not None  # of a run that trains
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
