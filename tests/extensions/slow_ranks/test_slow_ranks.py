"""Slow ranks by name: series of times with noise that lasts, of healthy runs and of runs with one fault."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.extensions.slow_ranks.change import SLOW_RANK, SLOW_RANK_OVER, Change, Place
from pretrain.extensions.slow_ranks.rank_times import LOAD, NUM_VALUES, TIMES, RankTimes, RankTimesLog, rank_times
from pretrain.extensions.slow_ranks.slow_ranks import SlowRanks
from pretrain.extensions.slow_ranks.statistics import lower_median
from pretrain.monitor.rows import EVENTS
from tests.extensions.slow_ranks.plant import rows_of

STEP_MS, STEPS = 400.0, 10  # a row takes 4 s


@dataclass(frozen=True)
class Cluster:
    """Ranks by host and pipeline stage, and how noisy their times are."""

    hosts: int = 1
    ranks_per_host: int = 4
    stages: int = 1
    noise: float = 0.1  # fraction of a row
    lasting: float = 0.8  # correlation of the noise of a row with that of the one before
    stage_cost: tuple[float, ...] = (1.0,)  # own time of a stage

    @property
    def places(self) -> list[Place]:
        size = self.hosts * self.ranks_per_host
        return [Place(f"host{rank // self.ranks_per_host}", rank * self.stages // size) for rank in range(size)]

    @property
    def work(self) -> list[float]:
        """Predicted work of the stages. The first one takes a third longer, the last one a quarter less."""
        cost = [self.stage_cost[stage % len(self.stage_cost)] for stage in range(self.stages)]
        return [0.75 * cost[0], *cost[1:-1], 1.25 * cost[-1]] if self.stages > 1 else cost


CLUSTERS = {
    "data_parallel": Cluster(), "two_ranks": Cluster(hosts=2, ranks_per_host=1), "16_on_2_hosts": Cluster(2, 8),
    "pipeline2": Cluster(stages=2, stage_cost=(1.0, 1.6)),
    "pipeline4": Cluster(stages=4, stage_cost=(1.0, 0.7, 0.7, 1.3)),
    "8x8": Cluster(8, 8), "8x8_pipeline4": Cluster(8, 8, stages=4, stage_cost=(1.2, 1, 1, 1.4))}


@dataclass(frozen=True)
class Fault:
    """Additional time of some ranks, in ms of a step, by key of TIMES or LOAD."""

    ranks: tuple[int, ...]
    more: dict[str, float] = field(default_factory=dict)
    first: int = 60
    last: int = 10**9


def series(cluster: Cluster, rows: int, *faults: Fault, seed: int = 0) -> list[RankTimes]:
    """Return the rows of a run. The noise is that of the CPU, for which threads wait."""
    numbers, places = np.random.default_rng(seed), cluster.places
    noise, found = np.zeros(len(places)), []
    for row in range(rows):
        noise = cluster.lasting * noise + np.sqrt(1 - cluster.lasting ** 2) * numbers.normal(size=len(places))
        base = 0.4 * STEP_MS * np.array([cluster.stage_cost[place.stage % len(cluster.stage_cost)] for place in places])
        values = {key: np.zeros(len(places)) for key in (*TIMES, *LOAD)}
        delay = base * np.maximum(np.expm1(cluster.noise * noise) + 0.2, 0)
        values |= {"data": 0.02 * base, "forward": 0.33 * base + delay / 3, "backward": 0.6 * base + delay * 2 / 3,
                   "optimizer": 0.05 * base, "cpu": base.copy(), "run_delay": delay}
        for fault in faults:
            if fault.first <= row <= fault.last:
                for key, more in fault.more.items():
                    values[key][list(fault.ranks)] += more
        values["own"] = values["data"] + values["forward"] + values["backward"] + values["optimizer"]
        step = max(STEP_MS, float(values["own"].max()) * 1.05)
        values["reduce_wait"] = step - values["own"]
        matrix = np.stack([values[key] for key in (*TIMES, *LOAD)], axis=1)
        found.append(rank_times(matrix, step=1 + row * STEPS, steps=STEPS, step_ms=step))
    return found


def changes(cluster: Cluster, rows: list[RankTimes], **settings: Any) -> list[Change]:
    slow = SlowRanks(cluster.places, stage_work=cluster.work)
    return [change for row in rows for change in slow.observe(row, **settings)]


FAULTS: dict[str, dict[str, float]] = {
    "compute": {"forward": 60, "backward": 120, "cpu": 180}, "other load": {"backward": 180, "run_delay": 180},
    "throttling": {"backward": 180, "run_delay": 180, "throttled": 180}, "stopped": {"forward": 60, "backward": 120},
    "data": {"data": 180}, "slow disk": {"data": 180, "read_bytes": 3e6}}


@pytest.mark.parametrize("layout", [name for name in CLUSTERS if not name.startswith("8x8")])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_slow_rank_is_named_with_its_kind(layout: str, kind: str) -> None:
    cluster = CLUSTERS[layout]
    rank = len(cluster.places) - 1
    begun, ended = changes(cluster, series(cluster, 180, Fault((rank,), FAULTS[kind], 60, 120)))
    assert (begun.event, begun.ranks, begun.kind) == (SLOW_RANK, [rank], kind)
    assert begun.hosts == [cluster.places[rank].host]
    assert begun.stage == (cluster.stages - 1 if layout == "pipeline4" else None)
    assert abs(begun.since - (1 + 60 * STEPS)) <= 3 * STEPS
    assert begun.ratio > 1.5
    assert (ended.event, ended.ranks) == (SLOW_RANK_OVER, [rank])
    assert begun.step < 1 + 100 * STEPS < ended.step
    assert begun.record().keys() == {*EVENTS[SLOW_RANK][0].split(), "step"}
    assert ended.record().keys() == {*EVENTS[SLOW_RANK_OVER][0].split(), "step"}


def test_a_very_slow_rank_is_named_after_few_rows() -> None:
    """A step takes ten times as long: twelve rows would be many minutes."""
    cluster = CLUSTERS["data_parallel"]
    begun, = changes(cluster, series(cluster, 64, Fault((2,), {"backward": 4000, "run_delay": 4000})))
    assert (begun.ranks, begun.kind) == ([2], "other load")


@pytest.mark.parametrize("layout", [name for name in CLUSTERS if CLUSTERS[name].stages != 4 or "8x8" in name])
def test_a_rank_that_was_always_slow_is_found(layout: str) -> None:
    cluster = CLUSTERS[layout]
    begun, = changes(cluster, series(cluster, 60, Fault((1,), FAULTS["compute"], first=0)))
    assert begun.ranks == [1]
    assert begun.since <= 1 + 4 * STEPS


def slowed(rows: list[RankTimes], rank: int, ratio: float, first: int, *, spread: float, seed: int) -> list[RankTimes]:
    """Return the rows with a rank that takes `ratio` times as long from row `first` on, with a spread of its own."""
    numbers = np.random.default_rng(seed)
    for row in rows[first:]:
        own = row.ms["own"]
        more = max(ratio * math.exp(spread * numbers.normal()) - 1, 0.0) * own[rank]
        for values, part in ((own, 1.0), (row.ms["forward"], 1 / 3), (row.ms["backward"], 2 / 3),
                             (row.load["cpu"], 1.0)):
            values[rank] += part * more
    return [RankTimes(row.step, row.steps, max(row.step_ms, 1.05 * float(row.ms["own"].max())), row.ms, row.load)
            for row in rows]


@pytest.mark.parametrize("layout", CLUSTERS)
def test_a_rank_that_is_slow_from_the_first_45_s_on_is_named(layout: str, subtests: pytest.Subtests) -> None:
    """Its own past shows its slowness only, and how much it varies. With rows of 4 to 24 s."""
    cluster = CLUSTERS[layout]
    for ratio, first, spread in ((2.7, 0, 0.2), (2.7, 5, 0.0), (2.7, 11, 0.2), (5.9, 0, 0.2), (5.9, 11, 0.0)):
        with subtests.test(ratio=ratio, first=first, spread=spread):
            rows = slowed(series(cluster, 90, seed=first), 1, ratio, first, spread=spread, seed=first)
            found = changes(cluster, rows)
            assert [(change.event, change.ranks) for change in found] == [(SLOW_RANK, [1])]
            assert 0.7 * ratio < found[0].ratio < 1.4 * ratio
            seconds = sum(row.steps * row.step_ms for row in rows if row.step <= found[0].step) / 1e3
            assert seconds < 400


@pytest.mark.parametrize("layout", ["16_on_2_hosts", "8x8", "8x8_pipeline4"])
def test_a_slow_host_is_named_as_a_host(layout: str) -> None:
    cluster = CLUSTERS[layout]
    ranks = [rank for rank, place in enumerate(cluster.places) if place.host == "host1"]
    begun = changes(cluster, series(cluster, 100, Fault(tuple(ranks), FAULTS["throttling"])))[0]
    assert begun.ranks == ranks
    assert str(begun).startswith("host host1 (ranks 8, 9,")


def test_a_slow_pipeline_stage_is_named_as_a_stage() -> None:
    cluster = CLUSTERS["8x8_pipeline4"]
    ranks = [rank for rank, place in enumerate(cluster.places) if place.stage == 2]
    begun = changes(cluster, series(cluster, 120, Fault(tuple(ranks), FAULTS["compute"])))[0]
    assert (begun.ranks, begun.stage) == (ranks, 2)
    assert str(begun).startswith("pipeline stage 2 (ranks 32, 33,")


@pytest.mark.parametrize("noise", [0.03, 0.2, 0.5])
@pytest.mark.parametrize("layout", CLUSTERS)
def test_noise_gives_no_alarm(layout: str, noise: float) -> None:
    cluster = Cluster(**{**vars(CLUSTERS[layout]), "noise": noise})
    alarms = [change for seed in range(3) for change in changes(cluster, series(cluster, 100, seed=seed))]
    assert not alarms


def test_a_rank_that_is_slow_again_is_a_new_event() -> None:
    """An event is not repeated for the same steps, and the second one begins after the end of the first."""
    cluster, more = CLUSTERS["data_parallel"], FAULTS["compute"]
    found = changes(cluster, series(cluster, 300, Fault((2,), more, 60, 100), Fault((2,), more, 115, 160)))
    assert [change.event for change in found] == [SLOW_RANK, SLOW_RANK_OVER] * 2
    assert found[0].since < found[1].step < found[2].since
    assert found[2].step - found[2].since > 8 * STEPS


def test_blips_give_no_alarm() -> None:
    blips = [Fault((2,), {"backward": 3000, "run_delay": 3000}, first, first + 2) for first in range(10, 300, 30)]
    assert not changes(CLUSTERS["data_parallel"], series(CLUSTERS["data_parallel"], 300, *blips))


def test_the_load_of_experts_is_no_sign_of_a_slow_rank() -> None:
    cluster, fault = CLUSTERS["data_parallel"], Fault((2,), {"backward": 80, "cpu": 80}, first=0)
    assert changes(cluster, series(cluster, 100, fault))
    assert not changes(cluster, series(cluster, 100, fault), imbalance=1.6)


def test_a_slow_rank_that_nobody_waits_for_is_not_reported() -> None:
    """Data takes most of the step, or the others wait in a pipeline: 1.2 times as slow costs less than 5% of a step."""
    cluster = Cluster(noise=0.01)
    rows = series(cluster, 100, Fault((2,), {"backward": 32, "cpu": 32}))
    slow = [RankTimes(row.step, row.steps, 4 * row.step_ms, row.ms, row.load) for row in rows]
    assert changes(cluster, rows)
    assert not changes(cluster, slow)


def test_rows_of_short_steps_are_joined() -> None:
    cluster = CLUSTERS["data_parallel"]
    short = [RankTimes(row.step, 1, 20.0, {key: each / 20 for key, each in row.ms.items()},
                       {key: each / 20 for key, each in row.load.items()})
             for row in series(cluster, 1500, Fault((2,), FAULTS["compute"], 200, 300))]
    assert not changes(cluster, short)  # 2 s


def test_rows_are_written_and_read(tmp_path: Path) -> None:
    cluster = CLUSTERS["pipeline2"]
    rows = series(cluster, 20)
    log = RankTimesLog(tmp_path, [place.host for place in cluster.places],
                       [{"pipeline": place.stage} for place in cluster.places], first_step=0)
    text = "".join(json.dumps(line) + "\n" for row in rows for line in log.rows(row))
    (tmp_path / "rank_times.jsonl").write_text(text)
    header, read = json.loads(text.splitlines()[0]), rows_of(tmp_path)
    assert (header["start"], header["hosts"]) == (0, ["host0"] * 4)
    assert [place["pipeline"] for place in header["coordinates"]] == [0, 0, 1, 1]
    assert [each.step for each in read] == [row.step for row in rows]
    np.testing.assert_allclose(read[5].ms["own"], rows[5].ms["own"], atol=0.01)


def test_the_file_of_many_ranks_has_fewer_rows(tmp_path: Path) -> None:
    log = RankTimesLog(tmp_path, ["a"] * 1024, [{}] * 1024, first_step=0)
    values = np.ones((1024, NUM_VALUES))
    lines = [line for step in range(1, 161)
             for line in log.rows(rank_times(values, step=step, steps=1, step_ms=6.0))]
    assert len(lines) == 1 + 10
    assert lines[1]["steps"] == 16


def test_lower_median() -> None:
    assert lower_median(np.array([[3.0, 1.0], [1.0, 2.0]])).tolist() == [1.0, 1.0]
    assert lower_median(np.array([5.0, 1.0, 3.0, 4.0])) == 3.0
