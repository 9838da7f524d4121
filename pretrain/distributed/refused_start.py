"""Rank 0 tells the other ranks that the run is rejected, under a launcher that does not end them: plain `srun`.

Rank 0 validates more than the others. If it alone finds an error, the others would wait for it in the rendezvous until
this times out. So a rank 0 that rejects the run answers at its port with a few bytes, and then ends. The other ranks
ask before the rendezvous. The store that listens at this port otherwise sends nothing to a new connection.
"""

import contextlib
import errno
import os
import socket
import sys
import time

from pretrain.distributed.equal_ranks import EveryRankError, send_rejection
from pretrain.distributed.world import World

_REFUSED = b"ds-pretrain: rejected\n"
_ANSWER_WITHIN_S = 0.5
_POLL_S = 0.2
_SAME_ERROR_WITHIN_S = 5.0  # within which rank 0 finds an error that another rank finds, too
_ALL_HAVE_ASKED_WITHIN_S = 300.0  # they import torch before they ask


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
    with contextlib.suppress(OSError), _listen(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) as server:
        for _ in range(world.size - 1):
            server.settimeout(max(end - time.monotonic(), 0.01))
            connection, _ = server.accept()
            with contextlib.suppress(OSError), connection:
                connection.sendall(_REFUSED)


def _listen(address: str, port: int) -> socket.socket:
    """Listen at rank 0's address, or at all addresses if the other hosts know this one by another address."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family)


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
