"""Exchange values between ranks, or launchers, through a key-value store on the first one's host.

A rank that hangs or never starts would block all other ranks in a collective. With the store, the other ranks find out
which rank is missing. Torch is imported when the store is opened: launchers that need no store do not import it.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pretrain.daemon_threads import DaemonThreads
from pretrain.distributed.tcp_store import ForeignValueError, decode_value, encode_value, start_store, wait_for_port

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
D = TypeVar("D")
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
class _Answer(Generic[T, D]):
    """Rank 0's answer to all ranks: the result, the ranks without a value, or why a value cannot be read."""

    result: D | None = None
    silent: list[int] = field(default_factory=list)
    waited_s: float = 0.0
    received: dict[int, T] = field(default_factory=dict)  # set with `silent`: rank -> value of the other ranks
    problem: str = ""


@dataclass(frozen=True)
class RankStore:
    """The connection of one rank (or launcher) to the store, in which all ranks post their values."""

    store: "Store"
    rank: int
    size: int  # number of ranks
    timeout_s: float  # time-out of one phase

    def post(self, key: str, value: Any) -> None:
        """Set the value of a key."""
        self.store.set(key, encode_value(key, value))  # type: ignore[arg-type]  # torch accepts bytes, too

    def read(self, key: str, kind: Any) -> Any:
        """Return the value of a key that is set. Raises ForeignValueError if another program has written it."""
        return decode_value(key, self.store.get(key), kind)

    def ranks_with(self, phase: str) -> list[int]:
        """Return the ranks that have posted their value of a phase."""
        return [rank for rank in range(self.size) if self.store.check([key_of(phase, rank)])]

    def exchange(self, phase: str, value: T, combine: Callable[[list[T]], D], *, kinds: tuple[Any, Any],
                 wait_s: float | None = None) -> D:
        """Post `value`. Rank 0 calls `combine` with the values of all ranks, and every rank returns its result.

        `phase` is a name that no other exchange has, `kinds` are the types of `value` and of the result. If some ranks
        post nothing within `wait_s` (default: `timeout_s`) plus 5 s, every rank raises SilentRanksError. Raises
        ConnectionError if rank 0 does not answer, or if another program has written a value.
        """
        wait_s = self.timeout_s if wait_s is None else wait_s
        try:  # the store's own time-outs have no effect when the network drops all packets
            answer = run_with_timeout(lambda: self._exchange(phase, value, combine, kinds, wait_s),
                                      wait_s + 3 * _GRACE_S)
        except ForeignValueError:
            raise
        except (RuntimeError, TimeoutError) as error:  # RuntimeError: also the base class of torch's DistError
            raise ConnectionError(f"rank 0 does not answer ({phase}): {first_line(error)}") from None
        if answer.problem:
            raise ForeignValueError(answer.problem)
        if answer.silent:
            raise SilentRanksError(phase, answer.silent, answer.waited_s, answer.received)
        return cast(D, answer.result)

    def _exchange(self, phase: str, value: T, combine: Callable[[list[T]], D], kinds: tuple[Any, Any],
                  wait_s: float) -> _Answer[T, D]:
        key, answer_kind = f"{phase}: answer of rank 0", cast(Any, _Answer)[kinds]
        self.post(key_of(phase, self.rank), value)
        if self.rank == 0:
            try:
                answer = self._combine_values(phase, combine, kinds[0], wait_s + _GRACE_S)
            except ForeignValueError as error:
                answer = _Answer(problem=str(error))
            self.post(key, answer)
            return answer
        self.store.wait([key], timedelta(seconds=wait_s + 2 * _GRACE_S))
        return cast("_Answer[T, D]", self.read(key, answer_kind))

    def _combine_values(self, phase: str, combine: Callable[[list[T]], D], kind: Any, wait_s: float) -> _Answer[T, D]:
        """On rank 0: wait for the values of all ranks, and return the result of `combine`, or the silent ranks."""
        keys, found = [key_of(phase, rank) for rank in range(self.size)], list(range(self.size))
        try:
            self.store.wait(keys, timedelta(seconds=wait_s))
        except RuntimeError:
            found = self.ranks_with(phase)
        contents = self.store.multi_get([keys[rank] for rank in found])
        values = {rank: decode_value(keys[rank], content, kind) for rank, content in zip(found, contents, strict=True)}
        silent = [rank for rank in range(self.size) if rank not in values]
        if silent:
            return _Answer(None, silent, max(wait_s, self.timeout_s + _GRACE_S), values)
        return _Answer(combine(list(values.values())))

    def leave(self, silent: list[int]) -> None:
        """Leave the store; every rank calls this at its end. Rank 0 runs the store, so it waits for the other ranks.

        `silent`: ranks that rank 0 does not wait for.
        """
        with contextlib.suppress(RuntimeError, TimeoutError):  # missing ranks have been reported already
            run_with_timeout(lambda: self._leave(silent), 2 * _GRACE_S)

    def _leave(self, silent: list[int]) -> None:
        self.store.set(f"leave/{self.rank}", "")
        if self.rank == 0:
            others = [f"leave/{rank}" for rank in range(self.size) if rank not in silent]
            self.store.wait(others, timedelta(seconds=_GRACE_S))


def key_of(phase: str, rank: int) -> str:
    """Return the store's key for a rank's value. Errors about the value begin with the key."""
    return f"{phase}: rank {rank}"


def connect_store(address: str, port: int, name: str, *, rank: int, size: int, runs_server: bool, on_one_host: bool,
                  start_s: float, timeout_s: float) -> RankStore:
    """Connect to the store at `address`:`port`. Raises TimeoutError if no program listens there, and other OSErrors
    and RuntimeErrors.

    Args:
        address: address of the host of rank 0.
        port: port of the store. A process group with the same port shares its server.
        name: prefix of all keys.
        rank: index of this rank (or launcher).
        size: number of ranks.
        runs_server: whether this process runs the server.
        on_one_host: whether all ranks are on this host.
        start_s: seconds within which the server must start.
        timeout_s: time-out of one phase.
    """
    from torch.distributed import PrefixStore, TCPStore

    if runs_server:
        store = start_store(address, port, on_one_host=on_one_host, timeout_s=start_s, world_size=size)
    elif wait_for_port(address, port, start_s):
        store = TCPStore(address, port, size, False, timeout=timedelta(seconds=start_s), wait_for_workers=False,
                         multi_tenant=True)
    else:
        raise TimeoutError("no program listens there")
    return RankStore(PrefixStore(name, store), rank, size, timeout_s)


def run_with_timeout(action: Callable[[], T], timeout_s: float) -> T:
    """Run `action` in a thread. Returns its result, or raises its error.

    Raises TimeoutError after `timeout_s`; the thread of `action` then keeps running.
    """
    threads = DaemonThreads(1, name="store")
    future = threads.submit(action)
    is_done = bool(wait([future], timeout_s).done)
    threads.shutdown()  # the thread ends with `action`
    if not is_done:
        raise TimeoutError(f"did not finish within {timeout_s:g} s")
    return future.result()


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its text. The other lines are C++ stack frames."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
