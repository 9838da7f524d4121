"""A run on two hosts, which get no URL of --notify."""

from pathlib import Path

import pytest

from tests.cluster.test_multihost_launch import mpi, train_on_two_hosts
from tests.cluster.workers.ssh_hosts import Hosts, hosts
from tests.support.receivers import SECRET, receivers

__all__ = ["hosts", "mpi"]  # fixtures
pytestmark = pytest.mark.root


def test_a_run_on_two_hosts_sends_its_messages(hosts: Hosts, corpus: str, tmp_path: Path) -> None:
    with receivers() as server:
        written = train_on_two_hosts(hosts, corpus, tmp_path, "--notify", "UCX_URL", UCX_URL=server.url("good"))
    assert server.titles() == ["run: trains", "run: finished"]
    assert SECRET not in written
