"""Wait for a TCP port before a TCPStore connects to it: a TCPStore prints a stack trace for each failed attempt."""

import socket
import time

_POLL_S = 0.5


def wait_for_port(address: str, port: int, timeout_s: float) -> bool:
    """Wait up to `timeout_s` until a program listens on the port. Returns whether it does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=max(min(2.0, timeout_s), 0.1)).close()
            return True
        except OSError:
            time.sleep(_POLL_S)
    return False
