"""Work counted instead of timed: a count is the same on a slow and on a busy machine."""

import subprocess
import sys
from typing import Any

from pretrain.distributed.process import ROOT

# what takes a second or more to import; a refusal needs none of it
HEAVY = frozenset({"torch", "deepspeed", "tokenizers", "sentencepiece", "transformers.models",
                   "transformers.modeling_utils"})


def run_and_list_imports(command: list[str], **settings: Any) -> tuple["subprocess.CompletedProcess[str]", set[str]]:
    """Run `python COMMAND`; what became of it, and the modules that it imported."""
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
