"""Show what a starting run is doing, on rank 0, until its first line of output: half a minute where disks are cold.

On a terminal one line is rewritten; elsewhere each is a line of its own. It goes to stderr, the run's output to stdout.
"""

import os
import sys

from pretrain.console.screen import is_watched

_ERASE = "\r\033[K"


def status(text: str) -> None:
    """Show what begins now. Call `clear_status` before anything else is printed; a traceback overwrites the line."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        sys.stderr.write(f"{_ERASE}{text} ...\r" if is_watched(sys.stderr) else f"{text}\n")
        sys.stderr.flush()


def clear_status() -> None:
    """Erase the status line, for lines that remain."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None and is_watched(sys.stderr):
        sys.stderr.write(_ERASE)
        sys.stderr.flush()
