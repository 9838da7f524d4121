"""Open TCP connections between all hosts, and measure the round-trip time and the difference of the clocks."""

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pretrain.distributed.tcp_store import is_numeric

CONNECT_TIMEOUT_S = 5.0
_ATTEMPTS = 3  # the fastest attempt gives the most accurate clock difference
_THREADS = 16


@dataclass(frozen=True)
class ConnectionResult:
    """Result of a connection attempt from one host to another."""

    round_trip_s: float = 0.0  # time to open a connection and receive 8 bytes
    clock_offset_s: float = 0.0  # the other host's clock minus this host's
    error: str = ""  # why the connection failed; "": it succeeded


class ClockServer:
    """Server thread that sends this host's time to every client, until `close` is called.

    It listens on `address`, or on all addresses if `address` is a name: other hosts may resolve it differently.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.time) -> None:
        is_name = not is_numeric(address)
        dual = is_name and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
        self._socket = socket.create_server(("" if is_name else address, 0), family=family, backlog=1024,
                                            dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]
        self._clock = clock
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        """Send the time, as 8 bytes, to one client after another."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # the server was closed
            with connection:
                try:
                    connection.sendall(struct.pack("!d", self._clock()))
                except OSError:
                    continue

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()


def own_address(master: str) -> str:
    """Return this host's address on the network that leads to `master`, the host of rank 0. Raises OSError.

    On the host of rank 0, `master` may resolve to the loopback address. Then the result is the name `master`, which
    other hosts can resolve.
    """
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: this sends nothing
        found = str(probe.getsockname()[0])
    return master if found.startswith("127.") or found == "::1" else found


def measure_connection(address: tuple[str, int]) -> ConnectionResult:
    """Connect several times to the ClockServer at (address, port). Returns the fastest attempt or the first error."""
    found: list[ConnectionResult] = []
    for _ in range(_ATTEMPTS):
        try:
            start, tick = time.time(), time.perf_counter()
            with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as connection:
                answer = connection.recv(8, socket.MSG_WAITALL)
            round_trip = time.perf_counter() - tick
            (their_time,) = struct.unpack("!d", answer)
            if not math.isfinite(their_time):
                raise OSError("the answer is not a time")
        except (OSError, OverflowError, struct.error) as error:  # OverflowError: not a port
            return ConnectionResult(error=f"{address[0]}: {error}")
        found.append(ConnectionResult(round_trip, their_time - (start + round_trip / 2)))
    return min(found, key=lambda result: result.round_trip_s)


def measure_connections(addresses: dict[str, tuple[str, int]]) -> dict[str, ConnectionResult]:
    """Call `measure_connection` for each host, for up to 16 hosts in parallel. Returns host -> result."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(addresses, pool.map(measure_connection, addresses.values()), strict=True))


def host_name() -> str:
    """Return SLURM's name of this host, or the host name outside SLURM."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
