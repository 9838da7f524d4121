"""Counters of the kernel that show why a thread was slow, and the time in which a rank waits for others."""

import os
import time
from pathlib import Path

import pytest

from pretrain.engine.phases import BACKWARD, PhaseTimers
from pretrain.extensions.slow_ranks import own_times
from pretrain.extensions.slow_ranks.own_times import HostLoad, HostLoadReader
from tests.engine.test_phases import Device


def test_cpu_time_is_that_of_this_thread() -> None:
    reader = HostLoadReader()
    start = reader.read()
    while time.thread_time() * 1e3 < start.cpu_ms + 50:
        pass
    assert reader.read().since(start).cpu_ms > 49  # the clocks differ by some microseconds


def test_waiting_for_a_cpu_is_counted() -> None:
    """A child process computes on the same CPU."""
    reader, cpus = HostLoadReader(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    child = os.fork()
    if child == 0:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass
        os._exit(0)
    try:
        start = reader.read()
        while reader.read().since(start).cpu_ms < 100:
            pass
        assert reader.read().since(start).run_delay_ms > 10
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, cpus)


@pytest.mark.parametrize(("text", "expected"), [
    ("usage_usec 5\nnr_throttled 2\nthrottled_usec 3000\n", 3.0), ("nr_throttled 1\nthrottled_time 4000000\n", 4.0),
    ("", 0.0), ("x", 0.0)])
def test_quotas_of_both_versions_of_control_groups(text: str, expected: float, tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text(text)
    assert own_times._throttled_ms(tmp_path / "cpu.stat") == expected


def test_a_quota_that_is_set_later_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process is moved to a group that was throttled before, and a group around it is throttled."""
    outer, old, new = (tmp_path / name for name in ("outer", "old", "new"))
    groups = [outer, old]
    monkeypatch.setattr(own_times, "_quota_files", lambda: groups)
    outer.write_text("throttled_usec 0\n")
    reader = HostLoadReader()
    start = reader.read()
    new.write_text("throttled_usec 90000\n")
    groups[1] = new
    assert reader.read().since(start).throttled_ms == 0
    new.write_text("throttled_usec 95000\n")
    outer.write_text("throttled_usec 7000\n")
    assert reader.read().since(start).throttled_ms == 7


def test_missing_counters_are_0(tmp_path: Path) -> None:
    assert own_times._throttled_ms(tmp_path / "none") == 0
    assert HostLoad(1, 2).plus(HostLoad(1, 1)).since(HostLoad(2, 0)) == HostLoad(0, 3)


def test_each_wait_of_an_operation_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = PhaseTimers(Device().event)
    monkeypatch.setattr(own_times._Measured, "timers", timers)
    wait = own_times._measured(lambda: "done")
    before = own_times.host_waited_s()
    assert wait() == "done"
    assert own_times.host_waited_s() == before
    with timers.training_step():
        timers.enter(BACKWARD)
        assert [wait(), wait()] == ["done", "done"]
    assert (timers.take_ms()["backward"], timers.waited_ms["backward"]) == (50, 20)
    assert own_times.host_waited_s() > before
