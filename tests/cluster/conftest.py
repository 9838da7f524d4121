"""Fixtures that the tests of this folder share."""

from tests.cluster.workers.ssh_hosts import hosts

__all__ = ["hosts"]
