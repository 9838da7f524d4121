"""Measure what the times of ranks cost: python -m tests.extensions.slow_ranks.cost.

CPU time is measured, so that other programs on the machine count little.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pretrain.engine.phases import FORWARD, HostEvent, PhaseTimers
from pretrain.extensions.slow_ranks import own_times
from pretrain.extensions.slow_ranks.change import Place
from pretrain.extensions.slow_ranks.rank_times import NUM_VALUES, RankTimesLog, rank_times
from pretrain.extensions.slow_ranks.slow_ranks import SlowRanks

REPETITIONS, WAITS, READS, ROWS = 5, 5000, 500, 64


def microseconds(function: Callable[[], object], count: int) -> float:
    """Return the CPU time of a call: median over repetitions."""
    found = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        for _ in range(count):
            function()
        found.append((time.process_time() - start) / count * 1e6)
    return statistics.median(found)


def wait_us() -> float:
    """Return what one measured wait costs on a CPU."""
    timers = own_times._Measured.timers = PhaseTimers(HostEvent)
    measured = own_times._measured(lambda: None)

    def step() -> None:
        with timers.training_step():
            timers.enter(FORWARD)
            for _ in range(100):
                measured()

    return microseconds(step, WAITS // 100) / 100


def row_ms(ranks: int) -> float:
    """Return what a logged step costs rank 0: the search for slow ranks, and the row."""
    numbers = np.random.default_rng(0)
    slow = SlowRanks([Place(f"host{rank // 8}") for rank in range(ranks)])
    log = RankTimesLog(Path(), ["host"] * ranks, [{}] * ranks, first_step=0)
    start = time.process_time()
    for step in range(ROWS):
        values = 100 * (1 + 0.1 * numbers.random((ranks, NUM_VALUES)))
        times = rank_times(values, step=step, steps=1, step_ms=2000)
        slow.observe(times)
        log.rows(times)
    return (time.process_time() - start) / ROWS * 1e3


def main() -> None:
    print(f"one wait: {wait_us():.1f} us")
    print(f"one read of the counters: {microseconds(own_times.HostLoadReader().read, READS):.0f} us")
    for ranks in (4, 64, 1024):
        print(f"rank 0 in a logged step of {ranks} ranks: {row_ms(ranks):.1f} ms")


if __name__ == "__main__":
    main()
