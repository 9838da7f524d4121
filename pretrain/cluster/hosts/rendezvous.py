"""Hosts without ssh between them: one launcher on each, and a TCPStore on the first host through which they speak.

They compare their facts before anything starts; later a host whose ranks fail says so, and the others end theirs.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from pretrain.cluster.hosts import probe
from pretrain.cluster.hosts.multihost_job import LOST, Watch
from pretrain.cluster.hosts.preflight import Facts, Question, check_here, compare, token_in
from pretrain.cluster.hosts.wait_for_port import listens
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PORT_OFFSET = 1  # beyond --master_port, which is the ranks'
_POLL_S = 0.5


@dataclass(frozen=True)
class Meeting:
    """This host's place in it: `hosts` in the order of the hostfile, `number` its index."""

    store: "TCPStore"
    hosts: tuple[str, ...]
    number: int
    wait_s: float  # for the other launchers

    def _arrived(self, key: str) -> list[str]:
        """The hosts that have set `key/NUMBER`."""
        return [host for number, host in enumerate(self.hosts) if self.store.check([f"{key}/{number}"])]

    def _wait_for_all(self, key: str) -> None:
        end = time.monotonic() + self.wait_s
        while time.monotonic() < end and len(self._arrived(key)) < len(self.hosts):
            time.sleep(_POLL_S)

    def compare(self, slots: Mapping[str, int], question: Question) -> tuple[dict[str, Facts], str]:
        """(Host -> facts, compared; a name for the job). Raises ConfigError on every host, for the same reasons."""
        with _shared_token(self, question) as token:
            peer = self.hosts[0] if self.number else "".join(self.hosts[1:2])
            own = Facts(**probe.examine(question.request(token, peer)))
            self.store.set(f"facts/{self.number}", json.dumps(asdict(own)))
            self._wait_for_all("facts")
        there = self._arrived("facts")
        if len(there) < len(self.hosts):
            raise ConfigError("hosts", found="no launcher on " + ", ".join(set(self.hosts) - set(there)),
                              expected=f"launch/cluster.sh --no_ssh on each host within {self.wait_s:g} s")
        facts = {host: Facts(**json.loads(self.store.get(f"facts/{number}"))) for number, host in enumerate(self.hosts)}
        check_here(own)
        compare(facts[self.hosts[0]], facts, dict(slots))
        return facts, token.removeprefix(".cluster-")

    def listen(self, watch: Watch) -> None:
        """Note the failures of other hosts, until the first host's launcher has gone: that is one itself."""
        try:
            while True:
                for number, host in enumerate(self.hosts):
                    if number != self.number and self.store.check([f"code/{number}"]):
                        watch.failed(host, int(self.store.get(f"code/{number}")))
                time.sleep(_POLL_S)
        except RuntimeError:
            watch.failed(self.hosts[0], LOST)

    def leave(self, code: int, grace_s: float) -> None:
        """Tell the others how this host's ranks ended. The first host stays until all have left, or `grace_s`."""
        with suppress(RuntimeError):
            self.store.set(f"code/{self.number}", str(code))
            end = time.monotonic() + grace_s
            while self.number == 0 and time.monotonic() < end and len(self._arrived("code")) < len(self.hosts):
                time.sleep(_POLL_S)
        time.sleep(_POLL_S if self.number == 0 else 0)  # for the last one's answer


@contextmanager
def _shared_token(meeting: Meeting, question: Question) -> Iterator[str]:
    """The first host's token, on every host; it stays until all have looked for it."""
    if meeting.number != 0:
        meeting.store.wait(["token"])
        yield meeting.store.get("token").decode()
        return
    with token_in(question.run) as token:
        meeting.store.set("token", token)
        yield token


def join(hosts: tuple[str, ...], number: int, address: str, port: int, wait_s: float) -> Meeting:
    """Meet the launchers of the other hosts at `address`, the first one's. Raises ConfigError."""
    from torch.distributed import TCPStore

    if not 0 <= number < len(hosts):
        raise ConfigError("--node_rank", found=number, expected=f"0 to {len(hosts) - 1}, this host's place in the file")
    where = f"--master_addr {address}, port {port}"
    if number != 0 and not listens(address, port, wait_s):
        raise ConfigError(where, found="no answer", expected=f"the launcher of {hosts[0]}, the first host, within "
                          f"{wait_s:g} s", remedy="start launch/cluster.sh on it too, with --node_rank 0")
    try:
        store = TCPStore(address, port, None, number == 0, timedelta(seconds=wait_s), wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(where, found=str(error).splitlines()[0], expected="a free port, between launchers alone",
                          remedy="--master_port N takes others") from None
    return Meeting(store, hosts, number, wait_s)
