"""A checkpoint writer that kills itself after one sub-step of the commit. KILLED_WRITER_SUB_STEP names the sub-step."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.checkpoint.save import commit, writer

SUB_STEPS = ("wait_for_parts", "check_files", "write_manifest", "remove_parts", "publish", "write_latest")


def die_after(name: str) -> None:
    """Make `commit.NAME` kill this process after it has returned."""
    function: Callable[..., Any] = getattr(commit, name)

    def fatal(*args: Any, **keywords: Any) -> None:
        function(*args, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(commit, name, fatal)


if __name__ == "__main__":
    die_after(os.environ["KILLED_WRITER_SUB_STEP"])
    if os.fork() == 0:
        os.setsid()
        writer.main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
