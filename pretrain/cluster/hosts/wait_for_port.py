"""Wait until somebody listens: a TCPStore that tries by itself prints a stack for each attempt."""

import socket
import time

_POLL_S = 0.5


def listens(address: str, port: int, wait_s: float) -> bool:
    """Whether anybody does, within `wait_s`."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=max(min(2.0, wait_s), 0.1)).close()
            return True
        except OSError:
            time.sleep(_POLL_S)
    return False
