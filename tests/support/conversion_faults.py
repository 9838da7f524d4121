"""Run a subcommand with a fault while it writes: a signal to itself, or a limit on the size of files."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.launch import PROGRAM

# sends the signal argv[1] to itself when a file of weights is written for the third time
_CODE = """
import os, runpy, sys
from pretrain.checkpoint.format.hashed_files import HashedFile
number, program = int(sys.argv[1]), sys.argv[2]
calls, write = [], HashedFile.write
def write_and_kill(self, data):
    calls.append(data)
    if len(calls) == 3:
        os.kill(os.getpid(), number)
    return write(self, data)
HashedFile.write = write_and_kill
sys.argv = sys.argv[2:]
runpy.run_path(program, run_name="__main__")
"""


def run_tool(subcommand: str, *words: str | Path, kill: signal.Signals | None = None,
             largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `ds-pretrain SUBCOMMAND` in its own process.

    Args:
        kill: signal that the program sends to itself while it writes weights.
        largest_file: bytes; a longer write fails with an OSError, as on a full disk.
    """
    start = [PROGRAM] if kill is None else ["-c", _CODE, str(int(kill)), PROGRAM]

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    return subprocess.run([sys.executable, *start, subcommand, *map(str, words)], capture_output=True, text=True,
                          check=False, preexec_fn=limit, env={**os.environ, "DS_ACCELERATOR": "cpu"})
