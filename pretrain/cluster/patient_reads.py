"""Reads of a run folder on a network file system, which may fail for a moment: ESTALE, EIO, EACCES, or no folder.

Whoever starts a run must not end because of such an error: the run would not be restarted, or its exit code be lost.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pretrain.cli import say

RETRY_S = 60.0  # for which a read is tried again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
T = TypeVar("T")
U = TypeVar("U")


def read_patiently(run: Path, read: Callable[[], T], *, otherwise: U, exists: bool = False,
                   report: Callable[[str], None] = say) -> T | U:
    """Return `read()`, which may raise OSError: then it is tried again for a minute, reported, and is `otherwise`.

    `exists`: the run folder exists, so that an unmounted file system is an error, and not a folder without files.
    """
    end, pause_s = time.monotonic() + RETRY_S, _FIRST_PAUSE_S
    while True:
        try:
            if exists:
                os.stat(run)
            return read()
        except OSError as error:
            if time.monotonic() >= end:
                report(f"warning: {run} cannot be read: {error.strerror or error}")
                return otherwise
        time.sleep(min(pause_s, max(end - time.monotonic(), 0.0)))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
