"""Rendezvous of launchers on hosts without ssh: one launcher per host, and a TCPStore on the first host.

Before the start, the launchers compare the facts of their hosts. When a host's ranks have ended, its launcher publishes
their exit code. If the ranks of one host fail, the other launchers end their own ranks. Exit codes are signed with a
secret that the first host has written into the run folder.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.cli import say
from pretrain.cluster.hosts import probe
from pretrain.cluster.hosts.multihost_job import LOST, JobState
from pretrain.cluster.hosts.preflight import HostFacts, PreflightRequest, check_equal, check_local_files, token_file
from pretrain.distributed.tcp_store import (
    SECRET_VARIABLE,
    ForeignValueError,
    decode_value,
    encode_value,
    start_store,
    wait_for_port,
)
from pretrain.errors import ConfigError, printable, shorten

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PORT_OFFSET = 1  # the store's port is --master_port + 1, because the ranks use --master_port
_POLL_S = 0.5
_TOKEN = re.compile(r"\.cluster-[0-9a-f]{16}")  # a file name: nothing that could lead out of the run folder


@dataclass(frozen=True)
class Rendezvous:
    """This launcher's connection to the launchers of the other hosts."""

    store: "TCPStore"
    hosts: tuple[str, ...]  # in the order of the hostfile
    index: int  # this host's index in `hosts`
    timeout_s: float  # time to wait for the other launchers

    def _set(self, key: str, value: Any, kind: Any) -> None:
        self.store.set(key, encode_value(key, value, kind))  # type: ignore[arg-type]  # torch accepts bytes, too

    def _get(self, key: str, kind: Any) -> Any:
        return decode_value(key, self.store.get(key), kind)

    def _hosts_with(self, key: str) -> list[str]:
        """Return the hosts that have set `key/INDEX`."""
        return [host for index, host in enumerate(self.hosts) if self.store.check([f"{key}/{index}"])]

    def _wait_for_all(self, key: str) -> None:
        """Wait until all hosts have set `key/INDEX`, at most `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline and len(self._hosts_with(key)) < len(self.hosts):
            time.sleep(_POLL_S)

    def check_hosts(self, ranks: Mapping[str, int], request: PreflightRequest) -> tuple[dict[str, HostFacts], str]:
        """Compare the facts of all hosts. Returns (host -> facts, name of the job).

        Raises ConfigError. If a launcher is missing or hosts differ, every host raises the error.
        """
        try:
            return self._check_hosts(ranks, request)
        except ForeignValueError as error:
            raise ConfigError("hosts", problem=str(error)) from None
        except RuntimeError as error:
            raise ConfigError("hosts", problem=f"the launcher of {self.hosts[0]}, the first host, has ended "
                                               f"({str(error).splitlines()[0]})",
                              remedy="its output says why") from None

    def _check_hosts(self, ranks: Mapping[str, int], request: PreflightRequest) -> tuple[dict[str, HostFacts], str]:
        with _shared_token(self, request) as token:
            peer = self.hosts[0] if self.index else "".join(self.hosts[1:2])
            local_facts = HostFacts(**probe.host_facts(request.to_json(token, peer)))
            secret = _read_secret(request.run / token)
            self._set(f"facts/{self.index}", local_facts, HostFacts)
            self._wait_for_all("facts")
        arrived = self._hosts_with("facts")
        if len(arrived) < len(self.hosts):
            missing = [host for host in self.hosts if host not in arrived]
            raise ConfigError("hosts", problem="no launcher started within "
                                               f"{self.timeout_s:g} s on {', '.join(missing)}",
                              remedy="start launch/cluster.sh --no_ssh on each host")
        facts = {host: self._get(f"facts/{index}", HostFacts) for index, host in enumerate(self.hosts)}
        check_local_files(local_facts)
        first = self.hosts[0]
        check_equal(first, facts[first], facts, dict(ranks))
        if not secret:
            raise ConfigError(f"--save {request.run}", problem=f"this host cannot read a file that {first} wrote there",
                              remedy="start all launchers as the same user")
        os.environ[SECRET_VARIABLE] = secret
        return facts, token.removeprefix(".cluster-")

    def listen(self, state: JobState) -> None:
        """Record the exit codes of the other hosts, until the store is gone. In that case the first host has failed."""
        watched = {index: host for index, host in enumerate(self.hosts) if index != self.index}
        try:
            while True:
                for index, host in list(watched.items()):
                    if self.store.check([f"code/{index}"]):
                        try:
                            state.record_exit(host, self._get(f"code/{index}", int))
                        except ForeignValueError as error:  # another program may not end the run
                            say(f"{host}: its exit code is unknown: {error}")
                            del watched[index]
                time.sleep(_POLL_S)
        except RuntimeError:
            state.record_exit(self.hosts[0], LOST)

    def leave(self, code: int, grace_s: float) -> None:
        """Publish this host's exit code. The first host waits up to `grace_s` for the hosts that came."""
        with suppress(RuntimeError):
            self._set(f"code/{self.index}", code, int)
            deadline = time.monotonic() + grace_s
            while self.index == 0 and time.monotonic() < deadline and \
                    {*self._hosts_with("facts")} - {*self._hosts_with("code")}:
                time.sleep(_POLL_S)
        if self.index == 0:
            time.sleep(_POLL_S)  # the store ends with this process: the last host must receive its answer before


def _read_secret(path: Path) -> str:
    """Return the content of the first host's token file; "" if this host does not share the run folder."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


@contextmanager
def _shared_token(rendezvous: Rendezvous, request: PreflightRequest) -> Iterator[str]:
    """Yield the name of the first host's token file, on every host.

    On the first host, the file is removed when the context is closed: by then all hosts must have looked for it.
    """
    if rendezvous.index != 0:
        rendezvous.store.wait(["token"])
        token = rendezvous._get("token", str)
        if not _TOKEN.fullmatch(token):
            raise ForeignValueError(f"token: another program has written this value: {shorten(printable(token))}")
        yield token
        return
    with token_file(request.run) as token:
        rendezvous._set("token", token, str)
        yield token


def join_rendezvous(hosts: tuple[str, ...], index: int, address: str, port: int, timeout_s: float) -> Rendezvous:
    """Connect to the launchers of the other hosts. Raises ConfigError.

    Args:
        hosts: all hosts, in the order of the hostfile.
        index: index of this host in `hosts`.
        address: address of the first host.
        port: port of the store on the first host.
        timeout_s: time to wait for the other launchers.
    """
    from torch.distributed import TCPStore

    if not 0 <= index < len(hosts):
        raise ConfigError("--node_rank", found=index,
                          expected=f"0 to {len(hosts) - 1}, the index of this host in the hostfile")
    where = f"--master_addr {address}, port {port}"
    if index != 0 and not wait_for_port(address, port, timeout_s):
        raise ConfigError(where, problem=f"the launcher of {hosts[0]}, the first host, did not answer within "
                                         f"{timeout_s:g} s",
                          remedy="start launch/cluster.sh on that host too, with --node_rank 0")
    try:
        store = start_store(address, port, on_one_host=len(hosts) == 1, timeout_s=timeout_s) if index == 0 else \
            TCPStore(address, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise ConfigError(where, problem=f"the launchers cannot use this port ({str(error).splitlines()[0]})",
                          remedy="choose other ports with --master_port N") from None
    return Rendezvous(store, hosts, index, timeout_s)
