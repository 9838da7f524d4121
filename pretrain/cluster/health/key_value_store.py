"""What ranks tell one another beside the process group: values in the key-value store of rank 0's host.

A rank that hangs or never came would hang all others in a collective; here the others miss it, by its number.
"""

import contextlib
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from pretrain.cluster.hosts.wait_for_port import listens
from pretrain.distributed.process import port_is_free
from pretrain.distributed.process_group import taken_port
from pretrain.distributed.world import World

T = TypeVar("T")
D = TypeVar("D")
START_SHARE = 2.0  # of the time-out, until all have come: a cold shared disk takes long to import torch from
_GRACE_S = 5.0  # between two ranks whose actions were both given as long


class SilentRanksError(Exception):
    """Some ranks did not say anything in time."""

    def __init__(self, phase: str, ranks: list[int], waited_s: float, came: dict[int, Any]) -> None:
        super().__init__(phase, ranks, waited_s, came)
        self.phase = phase
        self.ranks = ranks
        self.waited_s = waited_s
        self.came = came  # what the others posted


@dataclass(frozen=True)
class Board:
    """Rank `rank`'s access to what all `size` ranks post."""

    store: Store
    rank: int
    size: int
    timeout_s: float  # of one phase

    def exchange(self, phase: str, value: T, digest: Callable[[list[T]], D], *, wait_s: float | None = None) -> D:
        """Every rank posts `value`; rank 0 makes one answer of them, which all ranks get. Phases differ in their names.

        Raises SilentRanksError, on every rank, where some post nothing for `wait_s` (`timeout_s`) and 5 s;
        ConnectionError where rank 0 says nothing.
        """
        wait_s = self.timeout_s if wait_s is None else wait_s
        try:  # where no packet gets through, the store's own time-outs do not act
            answer = bounded(lambda: self._exchange(phase, value, digest, wait_s), wait_s + 3 * _GRACE_S)
        except (DistError, RuntimeError, TimeoutError) as error:
            raise ConnectionError(f"rank 0 says nothing ({phase}): {first_line(error)}") from None
        if isinstance(answer, SilentRanksError):
            raise answer
        return answer

    def _exchange(self, phase: str, value: T, digest: Callable[[list[T]], D], wait_s: float) -> D | SilentRanksError:
        self.store.set(f"{phase}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        if self.rank == 0:
            answer = self._answer(phase, digest, wait_s + _GRACE_S)
            self.store.set(f"{phase}/answer", pickle.dumps(answer))  # type: ignore[arg-type]
            return answer
        self.store.wait([f"{phase}/answer"], timedelta(seconds=wait_s + 2 * _GRACE_S))
        return pickle.loads(self.store.get(f"{phase}/answer"))

    def _answer(self, phase: str, digest: Callable[[list[T]], D], wait_s: float) -> D | SilentRanksError:
        names = [f"{phase}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(names, timedelta(seconds=wait_s))
        except DistError:
            silent = [rank for rank, name in enumerate(names) if not self.store.check([name])]
            if silent:
                came = {rank: pickle.loads(self.store.get(name)) for rank, name in enumerate(names)
                        if rank not in silent}
                return SilentRanksError(phase, silent, max(wait_s, self.timeout_s + _GRACE_S), came)
        return digest([pickle.loads(text) for text in self.store.multi_get(names)])

    def leave(self, silent: list[int]) -> None:
        """To be called by every rank at its end, however it ended: rank 0, which holds the store, goes last. It waits
        for none of the `silent`.
        """
        with contextlib.suppress(DistError, RuntimeError, TimeoutError):  # those that are missing have been named
            bounded(lambda: self._leave(silent), 2 * _GRACE_S)

    def _leave(self, silent: list[int]) -> None:
        self.store.set(f"leave/{self.rank}", "")
        if self.rank == 0:
            others = [f"leave/{rank}" for rank in range(self.size) if rank not in silent]
            self.store.wait(others, timedelta(seconds=_GRACE_S))


def join(world: World, timeout_s: float) -> Board:
    """The store at MASTER_ADDR:MASTER_PORT, which the process group will use too.

    Raises ConnectionError, and ConfigError for a port that another program listens on.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start_s = START_SHARE * timeout_s
    holds_store = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has its own
    if holds_store and not port_is_free(port):
        raise taken_port(world)
    try:
        if not holds_store and not listens(address, port, start_s):
            raise OSError("nobody listens")
        store = TCPStore(address, port, world.size, holds_store, timeout=timedelta(seconds=start_s),
                         wait_for_workers=False, multi_tenant=True)
    except (DistError, RuntimeError, OSError) as error:
        raise ConnectionError(f"no connection with rank 0 at {address}:{port} ({first_line(error)}); is it started, "
                              "and is this its address?") from None
    return Board(PrefixStore("check_cluster", store), world.rank, world.size, timeout_s)


def bounded(action: Callable[[], T], timeout_s: float) -> T:
    """What `action` returns or raises; TimeoutError where it takes longer, and then it goes on in its thread."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except Exception as error:  # handed to the caller
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise TimeoutError(f"no end after {timeout_s:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def first_line(error: BaseException) -> str:
    """An error's class and the first line of its text: what follows is C++ frames."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
