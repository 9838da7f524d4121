"""Show on rank 0 what a starting run is doing before its first line of output, which may take 30 s with cold disks.

A terminal shows one line that is updated; a log gets one line each. The status goes to stderr, the output to stdout.
"""

import os
import sys

from pretrain.terminal.screen import is_watched, terminal_columns, wrap

_ERASE = "\r\033[K"


def status(text: str) -> None:
    """Show the next activity. Call `clear_status` before other output; a traceback overwrites the line."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        sys.stderr.write(f"{_ERASE}{text} ...\r" if is_watched(sys.stderr) else f"{text}\n")
        sys.stderr.flush()


def print_line(text: str) -> None:
    """Print a line that remains to stderr. A terminal shows it wrapped between words."""
    if sys.stderr is not None:
        print(wrap(text, terminal_columns(sys.stderr)), file=sys.stderr, flush=True)


def clear_status() -> None:
    """Erase the status line before lines that remain."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None and is_watched(sys.stderr):
        sys.stderr.write(_ERASE)
        sys.stderr.flush()
