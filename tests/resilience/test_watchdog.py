"""The watchdog with real processes that import no torch; tests/distributed/resilience/test_hangs.py trains."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.flags.parse import parse_arguments
from pretrain.resilience.hang_report import RankRecord, describe_hang
from pretrain.resilience.watchdog import TimeOuts
from pretrain.resilience.watcher import IdleTime
from tests.support.launch import LIMIT_S, ROOT

TIME_OUT_S = 2.0
# `RANK.py RUN RANK WORLD_SIZE HOW`: a rank that makes progress until HOW makes it hang. It has a second thread.
RANK = f"""
import ctypes, os, select, signal, sys, threading, time
from pathlib import Path
from pretrain.distributed.world import World
from pretrain.resilience.watchdog import PHASES, TimeOuts, Watchdog

run, rank, size, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
limits = dict.fromkeys(PHASES, ({TIME_OUT_S}, "--step_timeout"))
threading.Thread(target=time.sleep, args=[600], name="second", daemon=True).start()

def wait_forever(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

with Watchdog(run, World(rank, size, rank, size, "torch"), TimeOuts(limits, limits)) as watchdog:
    watchdog.set_ranks([("a", 1)] * size)
    for step in range(1, 6):
        watchdog.enter("step", step)
        time.sleep(0.1)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:  # until all ranks are ready, which takes long under load
        watchdog.beat()
    if how == "with_lock":
        wait_forever(ctypes.PyDLL(None))
    elif how == "without_lock":
        wait_forever(ctypes.CDLL(None))
    elif how == "python":
        while True:
            pass
    elif how == "behind":
        watchdog.enter("data", 6)
        time.sleep(600)
    elif how == "wait":
        watchdog.enter("data", 6)
        watchdog.enter("step", 6)
        time.sleep(600)
    elif how in ("slow", "slow_for_minutes"):  # longer than the time-out in total, but with progress
        for _ in range(10 if how == "slow" else 1000):
            time.sleep({TIME_OUT_S} / 5)
            watchdog.enter("eval", 6)
    elif how == "reads":  # one call that takes longer than the time-out, but reads files
        watchdog.enter("save", 6)
        end = time.monotonic() + 2 * {TIME_OUT_S}
        while time.monotonic() < end:
            Path(sys.executable).resolve().read_bytes()
    print("end", flush=True)
"""


@contextmanager
def started(run: Path, *ranks: str, world_size: int | None = None) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one rank for each word, which says how the rank hangs. At the end, kill the ranks that still run."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    processes = [subprocess.Popen([sys.executable, "-c", RANK, str(run), str(rank), str(world_size or len(ranks)), how],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=environ)
                 for rank, how in enumerate(ranks)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def hang_event(run: Path) -> dict[str, Any]:
    (row,) = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert row["event"] == "hang"
    return dict(row)


def watchers(pid: int) -> list[int]:
    """Return the process ids of the watchers of a rank."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "pretrain.resilience.watcher" in command and f'"pid": {pid},' in command:
            found.append(int(folder.name))
    return found


def check_hang(run: Path, how: str) -> None:
    """The rank exits with 77, and its stacks are written."""
    with started(run, how) as (rank,):
        _, stderr = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 77, stderr
    record, stacks = (run / "hangs/1/rank_0.txt").read_text().split("\n\n", 1)
    assert RankRecord.from_text(record).step == 5
    assert RankRecord.from_text(record).pid == rank.pid
    assert "wait_forever" in stacks or how == "python"
    assert stacks.count("(most recent call first)") >= 3  # main, second, watchdog
    event = hang_event(run)
    assert event["path"] == str(run / "hangs" / "1")
    assert event["reason"] in stderr
    assert f"rank 0 (host {os.uname().nodename}, process {rank.pid}) is in phase step of step 5" in event["reason"]
    assert watchers(rank.pid) == []


def waits_with_the_interpreters_lock(run: Path) -> None:
    """The main thread waits inside C code and never releases Python's lock."""
    check_hang(run, "with_lock")


def waits_in_c(run: Path) -> None:
    check_hang(run, "without_lock")


def runs_in_circles(run: Path) -> None:
    check_hang(run, "python")


def a_stopped_rank_is_named_and_ends_without_doing_anything(run: Path) -> None:
    with started(run, "without_lock", "slow", "without_lock") as ranks:
        os.kill(ranks[1].pid, signal.SIGSTOP)
        for rank in (ranks[0], ranks[2]):
            rank.communicate(timeout=LIMIT_S)
        assert ranks[1].poll() is None, "the launcher must see the exit code 77 first"
        assert [ranks[0].returncode, ranks[2].returncode] == [77, 77]
        stdout, _ = ranks[1].communicate(timeout=LIMIT_S)
        assert ranks[1].returncode == -signal.SIGKILL
        assert stdout == ""
        assert hang_event(run)["ranks"] == [1]
        assert f"process {ranks[1].pid}) is stopped (SIGSTOP) in phase step of step 5" in hang_event(run)["reason"]


def a_rank_that_is_continued_after_the_hang_was_declared_exits(run: Path) -> None:
    """The watcher of rank 1 is stopped, too, as on a machine that was suspended alone."""
    with started(run, "without_lock", "slow_for_minutes") as ranks:
        (watcher,) = watchers(ranks[1].pid)
        for pid in (ranks[1].pid, watcher):
            os.kill(pid, signal.SIGSTOP)
        ranks[0].communicate(timeout=LIMIT_S)
        assert ranks[0].returncode == 77
        assert hang_event(run)["ranks"] == [1]
        for pid in (watcher, ranks[1].pid):
            os.kill(pid, signal.SIGCONT)
        stdout, _ = ranks[1].communicate(timeout=LIMIT_S)
        assert ranks[1].returncode == 77
        assert stdout == ""


def slow_progress_and_a_suspended_machine_are_no_hang(run: Path) -> None:
    """Both ranks are stopped for longer than the time-out: first without their watchers, then with them."""
    with started(run, "slow", "reads") as ranks:
        pids = [rank.pid for rank in ranks]
        for stopped in (pids, [*pids, *watchers(pids[0]), *watchers(pids[1])]):
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in stopped:
                    os.kill(pid, number)
                time.sleep(1.5 * TIME_OUT_S if number == signal.SIGSTOP else 0.1)
        for rank in ranks:
            stdout, stderr = rank.communicate(timeout=LIMIT_S)
            assert (rank.returncode, stdout, stderr) == (0, "end\n", "")
    assert not (run / "hangs").exists()


def ranks_that_never_started_and_ranks_that_are_behind_are_named(run: Path) -> None:
    with started(run, "behind", "wait", world_size=3) as ranks:
        for rank in ranks:
            rank.communicate(timeout=LIMIT_S)
        assert [rank.returncode for rank in ranks] == [77, 77]
    event = hang_event(run)
    assert event["ranks"] == [0, 2]
    assert "is behind, in phase data of step 6" in event["reason"]
    assert "1 rank waits in phase step of step 6" in event["reason"]


def a_hang_is_reported_without_a_run_folder(run: Path) -> None:
    run.write_text("a file")
    with started(run, "without_lock") as (rank,):
        _, stderr = rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 77
        assert "made no progress" in stderr
        assert "cannot be written (Not a directory)" in stderr


SCENARIOS = (waits_with_the_interpreters_lock, waits_in_c, runs_in_circles,
             a_stopped_rank_is_named_and_ends_without_doing_anything,
             a_rank_that_is_continued_after_the_hang_was_declared_exits,
             slow_progress_and_a_suspended_machine_are_no_hang,
             ranks_that_never_started_and_ranks_that_are_behind_are_named, a_hang_is_reported_without_a_run_folder)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> dict[str, "Future[None]"]:
    """Start all scenarios at the same time, because they mostly wait. Return their results by name."""
    pool, folder = ThreadPoolExecutor(len(SCENARIOS)), tmp_path_factory.mktemp("watchdog")
    return {each.__name__: pool.submit(each, folder / each.__name__) for each in SCENARIOS}


@pytest.mark.parametrize("name", [each.__name__ for each in SCENARIOS])
def test_hanging_ranks(name: str, running: dict[str, "Future[None]"]) -> None:
    running[name].result()


def test_jumps_of_the_clock_and_stopped_time_do_not_count() -> None:
    idle = IdleTime(tick_s=1.0, now=0.0)
    assert idle.update("a", 1.0, stopped=False) == 0
    assert idle.update("a", 2.0, stopped=False) == 1
    assert idle.update("a", 1202.0, stopped=False) == 3  # suspended for 20 minutes
    assert idle.update("a", 1203.0, stopped=True) == 3
    assert idle.update("a", 1204.5, stopped=False) == 4.5
    assert idle.update("b", 1205.0, stopped=False) == 0


def record(rank: int, phase: str = "step", step: int = 7, entered: int = 14, seconds: float = 600,
           state: str = "waiting") -> RankRecord:
    return RankRecord(rank=rank, host=f"h{rank}", pid=1, phase=phase, step=step, entered=entered, seconds=seconds,
                      limit_s=600.0, flag="--step_timeout", state=state)


@pytest.mark.parametrize(("records", "ranks", "named", "words"), [
    ([record(0), record(1)], [], [], "all 2 ranks are in phase step of step 7: compare their stacks; check the network "
                                         "between the 2 hosts"),
    ([record(0), record(1, "data", entered=13)], [], [1], "is behind, in phase data of step 7; 1 rank waits in"),
    ([record(0, step=8, entered=16), record(1, seconds=300)], [], [1], "is behind, in phase step of step 7"),
    ([record(0), record(1, state="stopped", step=6, seconds=0)], [], [1], "rank 1 (host h1, process 1) is stopped"),
    ([record(1)], [("elsewhere", 5), ("h1", 6)], [0], "(host elsewhere, process 5) does not answer: it has ended,"),
    ([record(1)], [(os.uname().nodename, 2**22 + 1), ("h1", 6)], [0], "process 4194305) has ended"),
    ([record(0)], [], [1], "rank 1 has not connected"),
    ([record(0, "data", step=3, entered=30), record(1, "rollback", step=8, entered=29)], [], [1], "in phase rollback"),
    ([record(0, "save"), record(1, "save")], [], [], "no progress for 600 s (--step_timeout 600)"),
])
def test_the_ranks_that_did_not_arrive_are_named(records: list[RankRecord], ranks: list[tuple[str, int]],
                                                 named: list[int], words: str) -> None:
    text, found = describe_hang({item.rank: item for item in records}, 2, ranks)
    assert found == named
    assert words in text


def test_time_outs_of_the_phases(corpus: str) -> None:
    def limits(*words: str) -> TimeOuts:
        return TimeOuts.from_flags(parse_arguments(["--deepspeed_config", "x.json", "--model", "tiny", "--train_data",
                                                    corpus, "--train_steps", "1", "--save", "r", *words]))

    default = limits()
    assert default.first["step"] == default.first["eval"] == (1800, "--first_step_timeout")
    assert default.later["step"] == default.later["data"] == default.later["eval"] == (600, "--step_timeout")
    assert default.later["save"] == (1800, "--save_timeout")
    assert default.later["build"] == default.later["trial"] == default.first["build"]  # a trial builds several
    assert limits("--step_timeout", "5").shortest_s == 5
    assert limits("--save_timeout", "9000").longest_s == 9000
    off = limits("--step_timeout", "0", "--first_step_timeout", "0")
    assert off.longest_s == 0
    assert limits("--step_timeout", "0").later["save"][0] == 0
