"""Slow network links: measured when all ranks wait for longer, and the host at their end is named."""

import numpy as np
import pytest

from pretrain.extensions.slow_ranks.change import SLOW_RANK, SLOW_RANK_OVER, Change, Place
from pretrain.extensions.slow_ranks.rank_times import LOAD, TIMES, RankTimes
from pretrain.extensions.slow_ranks.watch import Seconds, SlowLinks, rounds_of, slow_links

MS = 1e-3


def links(ranks: int, slow: tuple[int, ...] = (), *, hosts: int = 4, seed: int = 0) -> Seconds:
    """Return seconds of all measured pairs, of which those of the slow ranks that leave their host take 200 ms."""
    numbers, per_host = np.random.default_rng(seed), ranks // hosts
    pairs = [pair for pairs in rounds_of(ranks) for pair in pairs]
    return {(a, b): (200 if {a, b} & set(slow) and a // per_host != b // per_host else
                     numbers.uniform(1, 4)) * MS for a, b in pairs}


def places(ranks: int, hosts: int = 4) -> list[Place]:
    return [Place(f"host{rank * hosts // ranks}") for rank in range(ranks)]


def row(step: int, wait_ms: float) -> RankTimes:
    values = {key: np.full(4, 10.0) for key in (*TIMES, *LOAD)} | {"reduce_wait": np.full(4, wait_ms)}
    return RankTimes(step, 1, 1000.0, values, {key: values[key] for key in LOAD})


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64])
def test_each_rank_has_a_link_and_one_partner_at_a_time(ranks: int) -> None:
    rounds = rounds_of(ranks)
    assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(range(ranks))
    for pairs in rounds:
        both = [rank for pair in pairs for rank in pair]
        assert len(both) == len(set(both))


@pytest.mark.parametrize(("ranks", "hosts", "slow"), [
    (4, 4, (1,)), (8, 8, (0,)), (3, 3, (2,)), (16, 4, (4, 5, 6, 7)), (4, 4, (3,)), (2, 2, (0, 1)),
    (4, 2, (0, 1, 2, 3))])
def test_the_host_at_the_end_of_slow_links_is_named(ranks: int, hosts: int, slow: tuple[int, ...]) -> None:
    """Of two hosts, both are at the end of each link."""
    found = slow_links(links(ranks, slow, hosts=hosts), links(ranks, hosts=hosts, seed=1), places(ranks, hosts))
    assert found is not None
    assert found[0] == list(slow)


@pytest.mark.parametrize("seed", range(20))
def test_links_that_differ_by_noise_are_not_named(seed: int) -> None:
    for ranks, hosts in ((4, 4), (16, 2), (64, 8)):
        assert not slow_links(links(ranks, hosts=hosts, seed=seed), links(ranks, hosts=hosts, seed=99),
                              places(ranks, hosts))


def test_more_than_half_of_the_hosts_are_not_named() -> None:
    """Their CPUs are busy, or it is the switch."""
    assert not slow_links(links(8, (0, 1, 2, 3, 4, 5), hosts=8), links(8, hosts=8, seed=1), places(8, 8))


def test_links_inside_of_a_host_are_not_measured() -> None:
    watch = SlowLinks(places(4, 1), block_s=1.0)
    assert train(watch, range(1, 50), 50.0, {}) == ([], 0)
    assert train(watch, range(50, 100), 500.0, {}) == ([], 0)


def train(watch: SlowLinks, steps: range, wait_ms: float, measured: Seconds) -> tuple[list[Change], int]:
    """Return what is reported, and how often links were measured."""
    changes, probes = [], 0
    for step in steps:
        if watch.wants_probe:
            changes += watch.add_probe(measured)
            probes += 1
        watch.observe(row(step, wait_ms))
    return changes, probes


def test_links_are_measured_at_the_start_and_when_all_ranks_wait() -> None:
    watch = SlowLinks(places(4), block_s=1.0)
    assert train(watch, range(1, 100), 50.0, links(4)) == ([], 3)
    (begun,), probes = train(watch, range(100, 150), 500.0, links(4, (2,)))
    assert (probes, begun.event, begun.ranks, begun.kind) == (6, SLOW_RANK, [2], "network link")
    assert abs(begun.since - 100) <= 2
    (ended,), probes = train(watch, range(150, 600), 50.0, links(4))
    assert (ended.event, ended.ranks, probes) == (SLOW_RANK_OVER, [2], 3)


def test_waits_without_a_slow_link_are_not_reported_and_seldom_measured() -> None:
    watch = SlowLinks(places(4), block_s=1.0)
    train(watch, range(1, 100), 50.0, links(4))
    assert train(watch, range(100, 300), 500.0, links(4, seed=5)) == ([], 3)


def test_a_link_that_is_slow_for_some_steps_only_is_not_reported() -> None:
    watch = SlowLinks(places(4), block_s=1.0)
    train(watch, range(1, 100), 50.0, links(4))
    assert train(watch, range(100, 117), 500.0, links(4, (2,))) == ([], 3)
    assert train(watch, range(117, 300), 500.0, links(4)) == ([], 3)
