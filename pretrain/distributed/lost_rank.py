"""A rank that loses the connection to another rank: the other rank's error is the cause, and must stay the last one."""

import socket
import sys
import time

from pretrain.distributed.world import World
from pretrain.terminal import clear_status

# text of the errors of gloo (transport/tcp/pair.cc), NCCL and the TCP store, of torch 2.13
_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed",
             "remote process exited or there was a network error", "NCCL communicator was aborted")
_LAUNCHER_S = 5.0  # a launcher looks for failed ranks about once per second


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank has ended or cannot be reached."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def report_lost_connection(world: World, error: BaseException) -> None:
    """Print one line per host instead of a traceback, and give the launcher time to see the other rank's exit code."""
    if world.local_rank == 0:
        reason = next(text for text in _MESSAGES if text in str(error))
        clear_status()
        print(f"ds-pretrain: rank {world.rank} on {socket.gethostname()} lost the connection to another rank "
              f"({reason}). The cause is in the output of that rank.", file=sys.stderr, flush=True)
    time.sleep(_LAUNCHER_S)
