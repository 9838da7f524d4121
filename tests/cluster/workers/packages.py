"""Install the Debian packages that tests need."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def need_packages(purpose: str, packages: dict[str, str]) -> None:
    """Install the packages whose command is missing, or skip the test. `packages`: command -> package."""
    if _missing(packages) and os.geteuid() == 0 and shutil.which("apt-get"):
        with open(Path(tempfile.gettempdir()) / "ds-pretrain-tests-apt.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # apt-get fails if another one runs, such as a parallel test's
            _install(_missing(packages))
    if missing := _missing(packages):
        pytest.skip(f"{purpose} need the packages {', '.join(missing)}")


def _missing(packages: dict[str, str]) -> list[str]:
    return [package for command, package in packages.items() if shutil.which(command, path=PATH) is None]


def _install(packages: list[str]) -> None:
    """Without recommended packages: those of chromium are a print system, Samba and Perl, half a minute of work.

    The lists of packages are updated, which takes seconds, only if the installation fails with the present ones.
    """
    install = ["install", "-y", "-qq", "--no-install-recommends", *packages]
    for words in (install, ["update", "-qq"], install) if packages else ():
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(["apt-get", *words], env=environ, capture_output=True)
        if words is install and done.returncode == 0:
            return
