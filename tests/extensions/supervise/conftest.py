"""Fixtures shared by the tests of this folder."""

from tests.cluster.workers.ssh_hosts import hosts

__all__ = ["hosts"]
