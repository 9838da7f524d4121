"""What ranks agree on beside the step.

No rank waits in a collective for another one's disk or network: that may take longer than the process group's
time-out, which would end the job. Whoever waits asks again and again instead.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch.distributed as dist

from pretrain.errors import ConfigError, SaveError

T = TypeVar("T")
_ANNOUNCED_S = 10.0  # far below every process group's time-out
_POLL_S = 0.05


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(action: Callable[[], T]) -> T:
    """What `action` returns or raises (ConfigError, SaveError, OSError) on rank 0, on every rank.

    It may take long. On rank 0 it runs in a thread of its own; the others do not run it.
    """
    outcome: list[Any] = [False, None, None]  # done, value, error
    with ThreadPoolExecutor(1, thread_name_prefix="rank-0") as pool:
        future = pool.submit(action) if dist.get_rank() == 0 else None
        while not outcome[0]:
            if future is not None and wait([future], timeout=_ANNOUNCED_S).done:
                try:
                    outcome = [True, future.result(), None]
                except (ConfigError, SaveError, OSError) as error:
                    outcome = [True, None, error]
            dist.broadcast_object_list(outcome, src=0)
    _, value, failure = outcome
    if failure is not None:
        raise failure
    return value


def wait_until_all(done: Callable[[], bool]) -> None:
    """Return on every rank once `done` is true on every rank."""
    while not all(gather(done())):
        time.sleep(_POLL_S)
