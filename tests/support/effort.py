"""Measure work by counting calls and imports. Counts do not depend on the machine or its load."""

import subprocess
import sys
from typing import Any

from pretrain.distributed.process import ROOT

# modules that take 0.2 s or more to import; rejecting bad input needs none of them
HEAVY = frozenset({"torch", "deepspeed", "tokenizers", "sentencepiece", "transformers"})


def run_and_list_imports(command: list[str], **settings: Any) -> tuple["subprocess.CompletedProcess[str]", set[str]]:
    """Run `python COMMAND`. Return the finished process and the names of the modules that it imported."""
    done = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=False,
                          **{"cwd": ROOT, **settings})
    lines = done.stderr.splitlines(keepends=True)
    imports = [line for line in lines if line.startswith("import time:")]
    done.stderr = "".join(line for line in lines if not line.startswith("import time:"))
    return done, {line.rpartition("|")[2].strip() for line in imports}


class CountCalls:
    """Counts the calls of Python functions by the thread that enters the block."""

    def __enter__(self) -> "CountCalls":
        self.calls = 0
        sys.setprofile(self._count)
        return self

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
