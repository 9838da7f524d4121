"""Which hosts can open a TCP connection to which, how long that takes, and what their clocks say."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

CONNECT_TIMEOUT_S = 5.0
_ATTEMPTS = 3  # the fastest one tells the clock best
_THREADS = 16


@dataclass(frozen=True)
class Reach:
    """What one host found at another one's address."""

    round_trip_s: float = 0.0  # to open a connection and get 8 bytes
    clock_offset_s: float = 0.0  # the other clock less this one
    error: str = ""  # why there was no connection


class ClockServer:
    """Sends this host's time to whoever connects, from a thread, until it is closed."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        dual = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=1024,
                                            dualstack_ipv6=dual)
        self.port: int = self._socket.getsockname()[1]
        self._clock = clock
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.sendall(struct.pack("!d", self._clock()))
                except OSError:
                    continue

    def close(self) -> None:
        """Connections are refused from now on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()


def own_address(master: str) -> str:
    """The address of this host on the way to rank 0's; rank 0's own name may mean its loopback, then as others say it.

    Raises OSError.
    """
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        found = str(probe.getsockname()[0])
    return master if found.startswith("127.") or found == "::1" else found


def reach(address: tuple[str, int]) -> Reach:
    """Connect to a ClockServer some times; the fastest attempt, or the first error."""
    found: list[Reach] = []
    for _ in range(_ATTEMPTS):
        try:
            start, tick = time.time(), time.perf_counter()
            with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as connection:
                answer = connection.recv(8, socket.MSG_WAITALL)
            round_trip = time.perf_counter() - tick
            (theirs,) = struct.unpack("!d", answer)
        except (OSError, struct.error) as error:
            return Reach(error=f"{address[0]}: {error}")
        found.append(Reach(round_trip, theirs - (start + round_trip / 2)))
    return min(found, key=lambda each: each.round_trip_s)


def reach_all(addresses: dict[str, tuple[str, int]]) -> dict[str, Reach]:
    """`reach` for each host's address, several at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(addresses, pool.map(reach, addresses.values()), strict=True))


def host_name() -> str:
    """As the scheduler calls this host, or as it calls itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
