"""The pool of workers: order of the results, errors, killed workers, end of the parent."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

from pretrain.data.prepare.worker_pool import map_in_order
from pretrain.errors import ConfigError
from tests.support.supervised import wait_until

ROOT = Path(__file__).parents[3]


def make_square(delay: float) -> Callable[[int], tuple[int, bytes, int]]:
    def square(number: int) -> tuple[int, bytes, int]:
        if number % 5 == 0:
            time.sleep(delay)  # later jobs finish first
        return number**2, bytes(300_000), os.getpid()  # more than a pipe holds

    return square


def make_killed() -> Callable[[int], int]:
    def die_within_a_result(number: int) -> int:
        if number == 7:
            connection = sys._getframe(1).f_locals["connection"]
            os.write(connection.fileno(), b"\0\0\1\0part of a result")
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return die_within_a_result


def make_rejected() -> Callable[[int], int]:
    raise ConfigError("--tokenizer x", problem="it is damaged")


def make_failed() -> Callable[[int], float]:
    return lambda number: 1 / (number - 7)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_jobs(workers: int) -> None:
    found = list(map_in_order(functools.partial(make_square, 0.1), iter(range(25)), workers))
    assert [(job, result[0]) for job, result in found] == [(number, number**2) for number in range(25)]
    assert (os.getpid() in {result[2] for _, result in found}) == (workers == 1)


def test_jobs_are_not_read_far_ahead() -> None:
    read: list[int] = []
    jobs = (read.append(number) or number for number in range(1000))  # type: ignore[func-returns-value]
    results = map_in_order(functools.partial(make_square, 0.0), jobs, 2)
    for _ in range(20):
        next(results)
    assert len(read) <= 20 + 2 * 3 + 1
    results.close()  # type: ignore[attr-defined]


def test_a_worker_that_is_killed_within_a_result_is_noticed() -> None:
    with pytest.raises(ConfigError, match="one of 2 worker processes was killed"):
        list(map_in_order(make_killed, iter(range(100)), 2))


def test_an_error_at_the_start_of_a_worker_is_raised() -> None:
    with pytest.raises(ConfigError, match="--tokenizer x: it is damaged"):
        list(map_in_order(make_rejected, iter(range(100)), 2))


def test_workers_end_when_their_parent_is_killed() -> None:
    code = ("import functools\nfrom pretrain.data.prepare.worker_pool import map_in_order\n"
            "from tests.data.prepare.test_worker_pool import make_square\n"
            "if __name__ == '__main__':\n"
            "    for _, result in map_in_order(functools.partial(make_square, 0.0), iter(range(10**9)), 2):\n"
            "        print(result[2], flush=True)\n")
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers: set[int] = set()
    while len(workers) < 2:
        workers.add(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    wait_gone(workers)


def wait_gone(pids: Collection[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    """Return whether a process runs. Zombies do not count: in some containers, no process reaps orphans."""
    try:
        return Process(pid).status() != STATUS_ZOMBIE
    except NoSuchProcess:
        return False


def test_an_exception_in_a_worker_is_not_reported_as_a_kill(capfd: pytest.CaptureFixture[str]) -> None:
    """It may come from the code of an extension of the user."""
    with pytest.raises(ConfigError, match=r"--workers: one of 2 worker processes failed with the error above\."):
        list(map_in_order(make_failed, iter(range(25)), 2))
    assert "ZeroDivisionError" in capfd.readouterr().err
