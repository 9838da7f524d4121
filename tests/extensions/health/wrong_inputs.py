"""Command lines of the subcommands, and wrong ones: see tests/wrong_inputs/case.py and commands.py."""

import sys
from collections.abc import Callable
from typing import Any

TOOLS: dict[str, list[str]] = {"check-cluster": [], "doctor": []}
LEGAL = {"the default of the launcher": ("doctor --include=", "doctor --exclude=", "doctor --master_addr=")}
_FILES = {"under a file": "{world}/file/x", "long": "{world}/" + "n" * 300}
PATHS = [
    (("check-cluster",), "--save PATH", {**_FILES, "proc": "/proc/x", "proc below": "/proc/x/y"}, "--save"),
    (("doctor",), "--hostfile PATH", {**_FILES, "missing": "{world}/none", "folder": "{world}/nvme",
                                      "proc": "/proc/self/none"}, "--hostfile")]


def _check_cluster() -> Callable[[], Any]:
    from pretrain.extensions.health.check_command import check

    return lambda: check(sys.argv[1:])


MAINS = {"check-cluster": _check_cluster}  # its main ends the process
