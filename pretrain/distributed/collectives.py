"""Collective operations on Python values, and waiting for other ranks.

Waiting ranks poll. They do not wait inside a collective for another rank's disk or network: this may take longer than
the time-out of the process group, which would end the job.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pretrain.errors import ConfigError, SaveError

T = TypeVar("T")
_BROADCAST_INTERVAL_S = 10.0  # far below every process group's time-out
_FIRST_POLL_S = 0.002
_POLL_S = 0.05


class _OnPoll:
    """Holds the function that is called after each poll, in which all ranks took part."""

    call: Callable[[], None] = staticmethod(lambda: None)


def call_after_polls(function: Callable[[], None]) -> None:
    """Call `function` after each poll of `from_rank_0` and `wait_until_all`: all ranks are alive while they wait."""
    _OnPoll.call = staticmethod(function)


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def any_rank(value: bool) -> bool:
    """Return on every rank whether `value` is true on some rank. A rank sends one number, however many ranks wait."""
    from deepspeed.accelerator import get_accelerator  # prints a line, which programs that only read data have not

    found = torch.tensor([value], dtype=torch.int32, device=get_accelerator().current_device_name())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def gather_problems(own: list[str]) -> list[str]:
    """Return the problems of all ranks, in rank order, on every rank. Usually there are none: then none are sent."""
    return [line for lines in gather(own) for line in lines] if any_rank(bool(own)) else []


@contextmanager
def rejected_together() -> Iterator[None]:
    """Raise the first rank's ConfigError on every rank; collective."""
    rejection: list[str] = []
    try:
        yield
    except ConfigError as error:
        rejection = [str(error)]
    if rejections := gather_problems(rejection):
        raise ConfigError.from_line(rejections[0])


def from_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result or raise its error on every rank.

    Of errors, only ConfigError, SaveError and OSError reach the other ranks. `action` may take long: it runs in a
    thread, while all ranks poll for its end.
    """
    outcome: list[Any] = [False, None, None]  # done, value, error
    with ThreadPoolExecutor(1, thread_name_prefix="rank-0") as pool:
        future = pool.submit(action) if dist.get_rank() == 0 else None
        while not outcome[0]:
            if future is not None and wait([future], timeout=_BROADCAST_INTERVAL_S).done:
                try:
                    outcome = [True, future.result(), None]
                except (ConfigError, SaveError, OSError) as error:
                    outcome = [True, None, error]
            dist.broadcast_object_list(outcome, src=0)
            _OnPoll.call()
    _, value, failure = outcome
    if failure is not None:
        raise failure
    return value


def wait_until_all(done: Callable[[], bool]) -> None:
    """Return on every rank once `done` is true on every rank."""
    pause_s = _FIRST_POLL_S
    while any_rank(not done()):
        _OnPoll.call()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _POLL_S)
