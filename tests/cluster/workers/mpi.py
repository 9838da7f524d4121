"""Fixture that installs Open MPI and MPICH."""

import pytest

from tests.cluster.workers.packages import need_packages


@pytest.fixture(scope="module")
def mpi() -> None:
    """Install Open MPI and MPICH, or skip the test."""
    need_packages("MPI tests", {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"})
