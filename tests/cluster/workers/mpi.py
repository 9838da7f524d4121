"""Fixture that installs Open MPI and MPICH."""

import os
import shutil
import subprocess

import pytest

_PACKAGES = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}


def _missing() -> list[str]:
    return [package for command, package in _PACKAGES.items() if shutil.which(command) is None]


@pytest.fixture(scope="module")
def mpi() -> None:
    """Install Open MPI and MPICH, or skip the test."""
    if _missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=quiet, capture_output=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", *_missing()], env=quiet, capture_output=True)
    if _missing():
        pytest.skip(f"MPI tests need the packages {', '.join(_missing())}")
