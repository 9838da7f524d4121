"""Fixtures shared by the tests of this folder."""

from tests.cluster.workers.ssh_hosts import hosts
from tests.test_child import hostile, modules

__all__ = ["hostile", "hosts", "modules"]
