"""Exchange values between ranks through a key-value store on rank 0's host, without the process group.

A rank that hangs or never starts would block all other ranks in a collective. With the store, the other ranks find out
which rank is missing.
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

from pretrain.cluster.hosts.wait_for_port import wait_for_port
from pretrain.distributed.process import port_is_free
from pretrain.distributed.process_group import taken_port
from pretrain.distributed.world import World

T = TypeVar("T")
D = TypeVar("D")
START_TIMEOUT_FACTOR = 2.0  # ranks may start within this times the time-out: torch loads slowly from a cold disk
_GRACE_S = 5.0  # largest difference in time between two ranks that end at the same time-out


class SilentRanksError(Exception):
    """Some ranks posted no value in time."""

    def __init__(self, phase: str, ranks: list[int], waited_s: float, received: dict[int, Any]) -> None:
        super().__init__(phase, ranks, waited_s, received)
        self.phase = phase
        self.ranks = ranks
        self.waited_s = waited_s
        self.received = received  # rank -> value, for the ranks that posted one


@dataclass(frozen=True)
class RankStore:
    """One rank's connection to the store, in which all ranks post their values."""

    store: Store
    rank: int
    size: int  # number of ranks
    timeout_s: float  # time-out of one phase

    def exchange(self, phase: str, value: T, combine: Callable[[list[T]], D], *, wait_s: float | None = None) -> D:
        """Post `value`. Rank 0 calls `combine` with the values of all ranks, and every rank returns its result.

        `phase` is a name that no other exchange has. If some ranks post nothing within `wait_s` (default: `timeout_s`)
        plus 5 s, every rank raises SilentRanksError. Raises ConnectionError if rank 0 does not answer.
        """
        wait_s = self.timeout_s if wait_s is None else wait_s
        try:  # the store's own time-outs have no effect when the network drops all packets
            answer = run_with_timeout(lambda: self._exchange(phase, value, combine, wait_s), wait_s + 3 * _GRACE_S)
        except (DistError, RuntimeError, TimeoutError) as error:
            raise ConnectionError(f"rank 0 does not answer ({phase}): {first_line(error)}") from None
        if isinstance(answer, SilentRanksError):
            raise answer
        return answer

    def _exchange(self, phase: str, value: T, combine: Callable[[list[T]], D], wait_s: float) -> D | SilentRanksError:
        self.store.set(f"{phase}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        if self.rank == 0:
            answer = self._combine_values(phase, combine, wait_s + _GRACE_S)
            self.store.set(f"{phase}/answer", pickle.dumps(answer))  # type: ignore[arg-type]
            return answer
        self.store.wait([f"{phase}/answer"], timedelta(seconds=wait_s + 2 * _GRACE_S))
        return pickle.loads(self.store.get(f"{phase}/answer"))

    def _combine_values(self, phase: str, combine: Callable[[list[T]], D], wait_s: float) -> D | SilentRanksError:
        """On rank 0: wait for the values of all ranks, and return the result of `combine` or the error."""
        names = [f"{phase}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(names, timedelta(seconds=wait_s))
        except DistError:
            silent = [rank for rank, name in enumerate(names) if not self.store.check([name])]
            if silent:
                received = {rank: pickle.loads(self.store.get(name)) for rank, name in enumerate(names)
                            if rank not in silent}
                return SilentRanksError(phase, silent, max(wait_s, self.timeout_s + _GRACE_S), received)
        return combine([pickle.loads(text) for text in self.store.multi_get(names)])

    def leave(self, silent: list[int]) -> None:
        """Leave the store; every rank calls this at its end. Rank 0 runs the store, so it waits for the other ranks.

        `silent`: ranks that rank 0 does not wait for.
        """
        with contextlib.suppress(DistError, RuntimeError, TimeoutError):  # missing ranks have been reported already
            run_with_timeout(lambda: self._leave(silent), 2 * _GRACE_S)

    def _leave(self, silent: list[int]) -> None:
        self.store.set(f"leave/{self.rank}", "")
        if self.rank == 0:
            others = [f"leave/{rank}" for rank in range(self.size) if rank not in silent]
            self.store.wait(others, timedelta(seconds=_GRACE_S))


def connect_store(world: World, timeout_s: float) -> RankStore:
    """Connect to the store at MASTER_ADDR:MASTER_PORT. The process group will use the same store.

    Raises ConnectionError, and ConfigError if another program listens on the port.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start_s = START_TIMEOUT_FACTOR * timeout_s
    runs_store = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun runs one
    if runs_store and not port_is_free(port):
        raise taken_port(world)
    try:
        if not runs_store and not wait_for_port(address, port, start_s):
            raise OSError("no program listens there")
        store = TCPStore(address, port, world.size, runs_store, timeout=timedelta(seconds=start_s),
                         wait_for_workers=False, multi_tenant=True)
    except (DistError, RuntimeError, OSError) as error:
        raise ConnectionError(f"no connection to rank 0 at {address}:{port} ({first_line(error)}). Check that rank 0 "
                              "has started and that this is its address") from None
    return RankStore(PrefixStore("check_cluster", store), world.rank, world.size, timeout_s)


def run_with_timeout(action: Callable[[], T], timeout_s: float) -> T:
    """Run `action` in a thread. Returns its result, or raises its error.

    Raises TimeoutError after `timeout_s`; the thread of `action` then keeps running.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((action(), None))
        except Exception as error:  # passed on to the caller
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise TimeoutError(f"did not finish within {timeout_s:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its text. The other lines are C++ stack frames."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
