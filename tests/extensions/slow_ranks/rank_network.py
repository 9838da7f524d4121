"""A network of simulated hosts on this machine, one for each rank, whose links can be made slow."""

import contextlib
import os
import subprocess

from tests.cluster.workers.ssh_hosts import add_host, add_namespace


class Network:
    """A network namespace with an interface on one bridge, and a host name, for each rank. Needs root."""

    def __init__(self, ranks: int, stack: contextlib.ExitStack) -> None:
        self._name = f"sr{os.getpid()}"
        add_namespace(self._name, stack)
        for words in ("link add bridge type bridge", "link set bridge up"):
            subprocess.run(["ip", "-n", self._name, *words.split()], check=True)
        for rank in range(ranks):
            add_host(f"{self._name}r{rank}", "net0", f"10.77.0.{rank + 1}", link=f"v{rank}", bridge="bridge",
                     stack=stack, switch=self._name)

    def of_rank(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts a process there, and its environment."""
        return (["ip", "netns", "exec", f"{self._name}r{rank}", "unshare", "--uts", "sh", "-c",
                 f'hostname host{rank}; exec "$0" "$@"'],
                {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "net0"})

    def slow_down(self, rank: int, mbit: float) -> None:
        """Limit what the interface of a rank sends and receives."""
        for at, interface in ((f"{self._name}r{rank}", "net0"), (self._name, f"v{rank}")):
            subprocess.run(["tc", "-n", at, "qdisc", "replace", "dev", interface, "root", "tbf", "rate", f"{mbit}mbit",
                            "burst", "32kb", "latency", "400ms"], check=True)
