"""One start at a time may train into a run folder. tests/cluster/test_second_start.py has real runs."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.distributed.host import state_and_start
from pretrain.errors import ConfigError
from pretrain.resilience import lease_file, run_lock
from pretrain.resilience.lease_file import Owner, read_lease
from pretrain.resilience.run_lock import LOCK, RunLock, find_owner, reject_second_start
from tests.support.launch import ROOT
from tests.support.lock_process import scale_time
from tests.support.lock_race import ANOTHER_HOST, DEAD_PID, KINDS, write_lease
from tests.support.supervised import wait_until

STALE_S = 3.0  # instead of 60, and all other times of the lock in proportion


@pytest.fixture
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEARTBEAT_S", "WATCH_S", "STALE_S", "_CONFIRM_S", "_POLL_S"):
        monkeypatch.setattr(run_lock, name, getattr(run_lock, name))  # restored after the test
    scale_time(STALE_S)


def _holder(run: Path, *words: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock, and wait until it does."""
    command = [sys.executable, "-m", "tests.support.lock_process", str(run), "600", *words]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process with the lock of RUN. The processes are killed after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        processes.append(_holder(tmp_path / "run", *words))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_exactly_one_of_several_simultaneous_starts_wins(tmp_path: Path) -> None:
    """5 rounds of 4 processes for each of 6 states of the lock: 30 races."""
    done = subprocess.run([sys.executable, "-m", "tests.support.lock_race", str(tmp_path), "5", "4"], text=True,
                          capture_output=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert json.loads(done.stdout) == {kind: [1] * 5 for kind in KINDS}, done.stderr


def test_a_second_start_is_rejected_and_a_killed_one_is_replaced_at_once(
        tmp_path: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    run, first = tmp_path / "run", holder()
    for look in (reject_second_start, RunLock):
        began = time.monotonic()
        with pytest.raises(ConfigError, match=rf"--save .*run: another start is training in this run folder \(process "
                                              rf"{first.pid} on \S+, started 20\d\d-\S+ \S+ UTC\)\. Wait until"):
            look(run)
        print(f"rejected after {time.monotonic() - began:.3f} s")
    first.kill()
    first.wait()
    assert find_owner(run) is None
    lines: list[str] = []
    with RunLock(run, report=lines.append):
        assert lines == [f"{run}: the earlier start has ended without releasing its lock "
                         f"({read_owner_before(lines)})"]
    with RunLock(run, report=lines.append):  # the lock was released
        assert len(lines) == 1
    assert [path.name for path in run.iterdir() if path.name.startswith(LOCK)] == [LOCK]


def read_owner_before(lines: list[str]) -> str:
    return lines[0].partition("(")[2].rstrip(")")


def test_a_start_that_a_signal_or_an_exception_ends_releases_the_lock(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, ValueError, SystemExit):
        with pytest.raises(error), RunLock(tmp_path, report=pytest.fail):
            raise error
    with RunLock(tmp_path, report=pytest.fail):
        pass


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0])
def test_a_live_start_on_another_host_is_rejected_whatever_the_clocks(tmp_path: Path, skew_s: float) -> None:
    """The heartbeats come from a clock that differs by an hour."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            now = time.time_ns() + int(skew_s * 1e9)
            os.utime(tmp_path / LOCK, ns=(now, now))

    write_lease(tmp_path / LOCK, ANOTHER_HOST, age_s=-skew_s)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for look in (reject_second_start, RunLock):
            with pytest.raises(ConfigError, match="process 4711 on node7"):
                look(tmp_path)
    finally:
        ended.set()
        thread.join()


@pytest.mark.usefixtures("_short_times")
@pytest.mark.parametrize(("age_s", "waits"), [(3700.0, False), (STALE_S / 2, True), (-3600.0, True)])
def test_a_dead_start_on_another_host_is_taken_over_after_the_time_out(tmp_path: Path, age_s: float,
                                                                       waits: bool) -> None:
    """A heartbeat from the future (another clock) counts from when this start first sees it."""
    write_lease(tmp_path / LOCK, ANOTHER_HOST, age_s=age_s)
    lines: list[str] = []
    began = time.monotonic()
    with RunLock(tmp_path, report=lines.append):
        waited_s = time.monotonic() - began
    assert waited_s > min(max(STALE_S - age_s, run_lock.WATCH_S), STALE_S) - 0.1
    assert ["waiting" in line for line in lines] == ([True, False] if waits else [False])
    assert lines[-1].startswith(f"{tmp_path}: taking over the lock of a dead start (process 4711 on node7")


@pytest.mark.usefixtures("_short_times")
def test_a_process_of_another_container_is_not_mistaken_for_a_dead_one(tmp_path: Path) -> None:
    """Containers on one host share its boot id, and may share its name, but have other process ids."""
    write_lease(tmp_path / LOCK, replace(Owner(), pid=DEAD_PID, pid_namespace=1))
    lines: list[str] = []
    with RunLock(tmp_path, report=lines.append):
        assert "waiting" in lines[0]
    reused = replace(Owner(), process_start=1)  # a dead process, whose id belongs to this process now
    write_lease(tmp_path / LOCK, reused)
    assert reused.runs() is False
    with RunLock(tmp_path, report=lines.append):
        assert "waiting" not in lines[-1]


def test_a_stopped_start_that_lost_its_lock_writes_nothing_more(
        tmp_path: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    """The first start is stopped (SIGSTOP) until another host has taken its lease over, and then continued.

    It stops itself between two writes: no lease can prevent a write that had been checked before the stop.
    """
    run, rows = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    first = holder("stopped", str(STALE_S))
    wait_until(lambda: state_and_start(first.pid)[0] == "T")
    second = holder("here", str(STALE_S))
    lease = read_lease(run / LOCK)
    assert lease is not None
    first.send_signal(signal.SIGCONT)
    stderr = first.communicate()[1]
    assert first.returncode == 1
    assert stderr.startswith(f"ds-pretrain: error: {run}: this process was silent for more than"), stderr
    assert f"another start has taken over the run folder (process {second.pid} on" in stderr
    assert len(stderr.splitlines()) == 1
    wait_until(lambda: lease.owner.token in rows.read_text())
    second.kill()
    second.wait()
    owners = [json.loads(line)["owner"] for line in rows.read_text().splitlines()]
    at = owners.index(lease.owner.token)
    assert set(owners[at:]) == {lease.owner.token}, "the first start wrote after the second one had begun"


@pytest.mark.parametrize(("how", "reason"), [
    ("delete", "this folder was deleted or renamed while this process trained into it"),
    ("rename", "this folder was deleted or renamed while this process trained into it"),
    ("delete the lock", f"the lock {LOCK} of this process was deleted")])
def test_a_start_that_lost_its_run_folder_names_the_reason(
        how: str, reason: str, tmp_path: Path, holder: Callable[..., subprocess.Popen[str]]) -> None:
    run = tmp_path / "run"
    first = holder("here", str(STALE_S))
    first.send_signal(signal.SIGSTOP)  # it would make a deleted lock again
    if how == "delete the lock":
        (run / LOCK).unlink()
    else:
        run.rename(tmp_path / "renamed")
        if how == "delete":
            shutil.rmtree(tmp_path / "renamed")
    second = holder("here", str(STALE_S))
    first.send_signal(signal.SIGCONT)
    assert first.communicate()[1] == f"ds-pretrain: error: {run}: {reason}, and another start has taken over the run " \
        f"folder ({read_lease(run / LOCK).owner}); this one ends without saving\n"  # type: ignore[union-attr]
    assert first.returncode == 1
    assert second.poll() is None


@pytest.mark.usefixtures("_short_times")
def test_a_deleted_lock_is_made_again(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / LOCK).unlink()
        wait_until((tmp_path / LOCK).exists)
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
            RunLock(tmp_path)


def test_without_hard_links_the_lock_is_created_exclusively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(lease_file.os, "link", no_links)
    for _ in range(2):  # a new lease, and a released one
        with RunLock(tmp_path), pytest.raises(ConfigError, match="another start"):
            RunLock(tmp_path)


@pytest.mark.parametrize("content", ["", "x", "{}", '{"token": "../../x"}', "null", '{"host": 1}', "\udcff"])
def test_a_damaged_lock_of_an_unknown_owner_does_not_crash(content: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(os.fsencode(content))
    lease = read_lease(tmp_path / LOCK)
    assert lease is not None
    assert (lease.owner.host, lease.owner.runs()) == ("an unknown host", None)
    assert "/" not in lease.owner.token


@pytest.mark.root
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_file_system_that_cannot_hold_the_lock_is_reported_in_one_line(how: str, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        if how == "full":
            (tmp_path / "filler").write_bytes(bytes(65536))
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(ConfigError, match=rf"--save: the lock {tmp_path}/\S+ cannot be written \((No space left|"
                                              r"Read-only)"):
            RunLock(tmp_path)
        assert not list(tmp_path.glob(".run*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
