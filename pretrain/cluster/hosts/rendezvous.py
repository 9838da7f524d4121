"""Rendezvous of launchers on hosts without ssh: one launcher per host, and a TCPStore on the first host.

Before the start, the launchers compare the facts of their hosts. When a host's ranks have ended, its launcher publishes
their exit code. If the ranks of one host fail, the other launchers end their own ranks. Exit codes are signed with a
secret that the first host has written into the run folder.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from pretrain.cli import say
from pretrain.cluster.hosts import probe
from pretrain.cluster.hosts.multihost_job import LOST, JobState
from pretrain.cluster.hosts.preflight import HostFacts, PreflightRequest, check_equal, check_local_files, token_file
from pretrain.distributed.key_value_store import RankStore, SilentRanksError, connect_store, key_of
from pretrain.distributed.tcp_store import SECRET_VARIABLE, ForeignValueError
from pretrain.errors import ConfigError, printable, shorten

PORT_OFFSET = 1  # the store's port is --master_port + 1, because the ranks use --master_port
_POLL_S = 0.5
_TOKEN = re.compile(r"\.cluster-[0-9a-f]{16}")  # a file name: nothing that could lead out of the run folder


@dataclass(frozen=True)
class Rendezvous:
    """This launcher's connection to the launchers of the other hosts. Launchers are the ranks of the store."""

    store: RankStore
    hosts: tuple[str, ...]  # in the order of the hostfile

    def check_hosts(self, ranks: Mapping[str, int], request: PreflightRequest) -> tuple[dict[str, HostFacts], str]:
        """Compare the facts of all hosts. Returns (host -> facts, name of the job).

        Raises ConfigError. If a launcher is missing or hosts differ, every host raises the error.
        """
        try:
            return self._check_hosts(ranks, request)
        except SilentRanksError as error:
            missing = ", ".join(self.hosts[index] for index in error.ranks)
            raise ConfigError("hosts", problem=f"no launcher started within {self.store.timeout_s:g} s on {missing}",
                              remedy="start `ds-pretrain --no_ssh ...` on each host") from None
        except ForeignValueError as error:
            raise ConfigError("hosts", problem=str(error)) from None
        except ConnectionError as error:
            raise ConfigError("hosts", problem=f"the launcher of {self.hosts[0]}, the first host, has ended "
                                               f"({str(error).splitlines()[0]})",
                              remedy="its output says why") from None

    def _check_hosts(self, ranks: Mapping[str, int], request: PreflightRequest) -> tuple[dict[str, HostFacts], str]:
        first, index = self.hosts[0], self.store.rank
        assert request.run is not None, "without ssh, the hosts meet in the run folder"
        with ExitStack() as stack:  # the token's file exists until all hosts have looked for it
            token = stack.enter_context(token_file(request.run)) if index == 0 else ""
            token = self.store.exchange("token", token, lambda tokens: tokens[0], kinds=(str, str))
            if not _TOKEN.fullmatch(token):
                raise ForeignValueError(f"token: another program has written this value: {shorten(printable(token))}")
            peer = first if index else "".join(self.hosts[1:2])
            local_facts = HostFacts(**probe.host_facts(request.to_json(token, peer)))
            secret = _read_secret(request.run / token)
            found = self.store.exchange("facts", local_facts, lambda facts: facts, kinds=(HostFacts, list[HostFacts]))
        facts = dict(zip(self.hosts, found, strict=True))
        check_local_files(local_facts)
        check_equal(first, facts[first], facts, dict(ranks))
        if not secret:
            raise ConfigError(f"--save {request.run}", problem=f"this host cannot read a file that {first} wrote there",
                              remedy="start all launchers as the same user")
        os.environ[SECRET_VARIABLE] = secret
        return facts, token.removeprefix(".cluster-")

    def listen(self, state: JobState) -> None:
        """Record the exit codes of the other hosts, until the store is gone. In that case the first host has failed."""
        handled = {self.store.rank}
        try:
            while True:
                for index in {*self.store.ranks_with("code")} - handled:
                    handled.add(index)
                    try:
                        state.record_exit(self.hosts[index], self.store.read(key_of("code", index), int))
                    except ForeignValueError as error:  # another program may not end the run
                        say(f"{self.hosts[index]}: its exit code is unknown: {error}")
                time.sleep(_POLL_S)
        except RuntimeError:
            state.record_exit(self.hosts[0], LOST)

    def leave(self, code: int, grace_s: float) -> None:
        """Publish this host's exit code. The first host waits up to `grace_s` for the hosts that came."""
        with suppress(RuntimeError):
            self.store.post(key_of("code", self.store.rank), code)
            deadline = time.monotonic() + grace_s
            while self.store.rank == 0 and time.monotonic() < deadline and \
                    {*self.store.ranks_with("token")} - {*self.store.ranks_with("code")}:
                time.sleep(_POLL_S)
        if self.store.rank == 0:
            time.sleep(_POLL_S)  # the store ends with this process: the last host must receive its answer before


def _read_secret(path: Path) -> str:
    """Return the content of the first host's token file; "" if this host does not share the run folder."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def join_rendezvous(hosts: tuple[str, ...], index: int, address: str, port: int, timeout_s: float) -> Rendezvous:
    """Connect to the launchers of the other hosts. Raises ConfigError.

    Args:
        hosts: all hosts, in the order of the hostfile.
        index: index of this host in `hosts`.
        address: address of the first host.
        port: port of the store on the first host.
        timeout_s: time to wait for the other launchers.
    """
    if not 0 <= index < len(hosts):
        raise ConfigError("--node_rank", found=index,
                          expected=f"0 to {len(hosts) - 1}, the index of this host in the hostfile")
    where = f"--master_addr {address}, port {port}"
    try:
        return Rendezvous(connect_store(address, port, "launchers", rank=index, size=len(hosts), runs_server=index == 0,
                                        on_one_host=len(hosts) == 1, start_s=timeout_s, timeout_s=timeout_s), hosts)
    except TimeoutError:
        raise ConfigError(where, problem=f"the launcher of {hosts[0]}, the first host, did not answer within "
                                         f"{timeout_s:g} s",
                          remedy="start ds-pretrain on that host too, with --node_rank 0") from None
    except (RuntimeError, OSError) as error:
        raise ConfigError(where, problem=f"the launchers cannot use this port ({str(error).splitlines()[0]})",
                          remedy="choose other ports with --master_port N") from None
