"""Compare at the start what all ranks must have in common, before a collective could hang or train with it.

Each rank sends one digest to rank 0, through the store that the process group will use. Only if they differ, one rank
of each digest sends its values. Then every rank raises an error that names the first difference, the ranks and their
values.

Rank 0 validates more than the others. If it alone rejects the run, and the launcher does not end the other ranks
(plain `srun`), they would wait for it in the rendezvous until this times out. So it answers at its port with a few
bytes, and then ends. The other ranks ask before the rendezvous. The store that listens at this port otherwise sends
nothing to a new connection.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

from pretrain.distributed.host import LAUNCHER_VARIABLES
from pretrain.distributed.key_value_store import RankStore, SilentRanksError, connect_store, first_line, key_of
from pretrain.distributed.process import listen_on_all_addresses
from pretrain.distributed.tcp_store import listen
from pretrain.distributed.world import World
from pretrain.errors import CRASHED, ConfigError, listed, named, shorten

Facts = Mapping[str, str]  # name -> value as text; the first ones explain the others
_DIGESTS, _VALUES = "digest of what all ranks share", "values of what all ranks share"
_REPORT_AFTER_S = 60.0  # without a rank, which may still import torch from a busy file server
_MOST_GROUPS = 4  # groups of ranks with equal values, whose values are compared
_NOT_GIVEN = "nothing"
_REJECTED = "rejected by rank "
_REFUSED = b"ds-pretrain: rejected\n"
_ANSWER_WITHIN_S = 0.5
_POLL_S = 0.2
_SAME_ERROR_WITHIN_S = 5.0  # within which rank 0 finds an error that another rank finds, too
_ALL_HAVE_ASKED_WITHIN_S = 300.0  # they import torch before they ask


class EveryRankError(ConfigError):
    """An error that every rank raises: the ranks differ, or one of them has rejected the run."""


class MissingRanksError(EveryRankError):
    """Some ranks have not connected in time. Another start may succeed."""

    exit_code = CRASHED


def check_equal_ranks(world: World, facts: Facts, *, on_one_host: bool, timeout_s: float) -> RankStore:
    """Raise EveryRankError if the ranks have different facts, or if one has rejected the run.

    Returns the connection to the store. Rank 0's process group must form before it is dropped.

    Raises MissingRanksError if a rank does not connect within `timeout_s`, and OSError or RuntimeError if rank 0 cannot
    run the store.
    """
    store = _connect(world, on_one_host=on_one_host, timeout_s=timeout_s)
    digest = hashlib.sha256(json.dumps([*facts.items()]).encode()).hexdigest()
    groups: dict[str, list[int]] = {}  # on rank 0
    try:
        waited_s = _report_missing_ranks(store, world) if world.rank == 0 else 0.0
        different, line = store.exchange(_DIGESTS, digest, partial(_first_ranks, groups),
                                         kinds=(str, tuple[list[int], str]), wait_s=max(timeout_s - waited_s, 0.0))
        if not different:
            return store
        if not line:
            own = (socket.gethostname(), [*facts.items()]) if world.rank in different else ("", [])
            line = store.exchange(_VALUES, own, lambda values: _difference(values, [*groups.values()]),
                                  kinds=(tuple[str, list[tuple[str, str]]], str))
        store.leave(different if line.startswith(_REJECTED) else [])
    except SilentRanksError as error:
        store.leave(error.ranks)
        raise MissingRanksError(named("rank", error.ranks), problem="not connected to rank 0 within "
                                f"{error.waited_s:g} s", remedy="their output says why") from None
    except ConnectionError as error:
        raise MissingRanksError("rank 0", problem=first_line(error), remedy="its output says why") from None
    raise EveryRankError.from_line(line)


def send_rejection(world: World, error: Exception, *, on_one_host: bool, timeout_s: float) -> None:
    """Report to rank 0, and so to all ranks, that this rank alone has rejected the run. They would wait for it."""
    with contextlib.suppress(OSError, RuntimeError, ConfigError):  # rank 0 has ended, or waits in no store
        store = _connect(world, on_one_host=on_one_host, timeout_s=timeout_s)
        store.post(key_of(_DIGESTS, world.rank), f"{_REJECTED}{world.rank} ({socket.gethostname()}): {error}")


def _connect(world: World, *, on_one_host: bool, timeout_s: float) -> RankStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun runs a store, which remains when it starts the ranks again
    runs_server = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    connect = partial(connect_store, address, port, f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}",
                      rank=world.rank, size=world.size, runs_server=runs_server, on_one_host=on_one_host,
                      timeout_s=timeout_s)
    with contextlib.suppress(TimeoutError):
        return connect(start_s=min(_REPORT_AFTER_S, timeout_s))
    _say(f"rank {world.rank} waits for rank 0, which does not listen at {address}:{port} yet. {_advice(world)}")
    try:
        return connect(start_s=timeout_s)
    except TimeoutError:
        raise MissingRanksError("rank 0", problem=f"no program listens at {address}:{port} within {timeout_s:g} s",
                                remedy=_advice(world)) from None


def _report_missing_ranks(store: RankStore, world: World) -> float:
    """Say on rank 0 for which ranks it waits, if they do not connect soon. Returns the seconds until they did."""
    began = time.monotonic()
    try:
        store.store.wait([key_of(_DIGESTS, rank) for rank in range(1, world.size)], timedelta(seconds=_REPORT_AFTER_S))
    except RuntimeError:
        missing = sorted({*range(1, world.size)} - {*store.ranks_with(_DIGESTS)})
        _say(f"rank 0 waits for {named('rank', missing)} of {world.size}. {_advice(world)}")
    return time.monotonic() - began


def _advice(world: World) -> str:
    """Return what to type if nobody starts the other ranks: the variables of a launcher remain in its shells."""
    names = LAUNCHER_VARIABLES.get(world.launcher, ("PMIX_RANK", "PMIX_RANK"))[:1 if world.launcher == "slurm" else 2]
    return "If this is a shell in which no launcher starts them, begin the command with " \
           f"`env {' '.join(f'-u {name}' for name in dict.fromkeys(names))}`"


def _say(line: str) -> None:
    print(f"ds-pretrain: {line}", file=sys.stderr, flush=True)


def _first_ranks(groups: dict[str, list[int]], digests: Sequence[str]) -> tuple[list[int], str]:
    """Fill `groups`: digest -> ranks. Return the first rank of each of the first groups; [] if all are equal.

    If ranks have rejected the run, return them, and the line of the first one.
    """
    for rank, digest in enumerate(digests):
        groups.setdefault(digest, []).append(rank)
    if rejected := [rank for rank, digest in enumerate(digests) if digest.startswith(_REJECTED)]:
        return rejected, digests[rejected[0]]
    return [ranks[0] for ranks in groups.values()][:_MOST_GROUPS] if len(groups) > 1 else [], ""


def _difference(values: Sequence[tuple[str, Sequence[tuple[str, str]]]], groups: Sequence[Sequence[int]]) -> str:
    """Return the line about the first difference between groups of ranks. The first ranks have sent their values."""
    compared = groups[:_MOST_GROUPS]
    facts = [dict(values[ranks[0]][1]) for ranks in compared]
    names = dict.fromkeys(name for own in facts for name in own)
    differing = [name for name in names if len({own.get(name) for own in facts}) > 1]
    found: dict[str, list[int]] = {}  # value -> ranks
    for own, ranks in zip(facts, compared, strict=True):
        found.setdefault(own.get(differing[0], _NOT_GIVEN), []).extend(ranks)
    texts = [f"{shorten(value, 100)} on {named('rank', sorted(ranks))} ({values[ranks[0]][0]})"
             for value, ranks in found.items()]
    more = f"; {len(differing) - 1} more differ, such as {listed(differing[1:], 3)}" if len(differing) > 1 else ""
    return str(ConfigError(differing[0], problem=f"the ranks must have the same value, and it is {', and '.join(texts)}"
                           + more, remedy="start all ranks with the same command, files, packages and variables"))


def _are_left_waiting(world: World) -> bool:
    return world.size > 1 and world.launcher == "slurm"


def announce_rejection(world: World, error: Exception) -> None:
    """Let all ranks end after this one has rejected the run, before the process group forms.

    Rank 0 returns when all others have asked. Another rank asks whether rank 0 ends, too; if not, it sends the error.
    """
    formed = "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()
    if not _are_left_waiting(world) or formed or isinstance(error, EveryRankError):
        return
    if world.rank != 0:
        if not is_refused(world, timeout_s=_SAME_ERROR_WITHIN_S):
            send_rejection(world, error, on_one_host=False, timeout_s=_ALL_HAVE_ASKED_WITHIN_S)
        return
    end = time.monotonic() + _ALL_HAVE_ASKED_WITHIN_S
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # at all addresses, if the other hosts know this one by another address
    with contextlib.suppress(OSError), listen(address, port) or listen_on_all_addresses(port) as server:
        for _ in range(world.size - 1):
            server.settimeout(max(end - time.monotonic(), 0.01))
            connection, _ = server.accept()
            with contextlib.suppress(OSError), connection:
                connection.sendall(_REFUSED)


def is_refused(world: World, timeout_s: float) -> bool:
    """Return whether rank 0 has rejected the run. Waits for rank 0's port; False after `timeout_s`."""
    if not _are_left_waiting(world) or world.rank == 0:
        return False
    address, end = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=2.0) as connection:
            connection.settimeout(_ANSWER_WITHIN_S)
            with contextlib.suppress(TimeoutError):
                return connection.recv(len(_REFUSED), socket.MSG_WAITALL) == _REFUSED
            return False
        time.sleep(_POLL_S)
    return False
