"""pretrain/train.py that reports where the host waits for the GPU in the steps 5 to 8, which are not logged.

Each place is a line `WAIT file:line`: the first line of this project or of DeepSpeed in the call stack.
"""

import runpy
import traceback
import warnings
from typing import Any

import torch

from pretrain import step_loop
from tests.support.launch import ROOT

FIRST, LAST = 5, 8


def show(*arguments: Any, **others: Any) -> None:
    frames = [frame for frame in traceback.extract_stack()[:-1]
              if "/pretrain/" in frame.filename or "/deepspeed/" in frame.filename]
    if "synchroniz" in str(arguments[0]) and frames:
        print(f"WAIT {frames[-1].filename}:{frames[-1].lineno}", flush=True)


def watched(train_batch: Any) -> Any:
    """Let torch report synchronizations from the step FIRST on until the step LAST has ended and was observed."""
    calls = 0

    def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        torch.cuda.set_sync_debug_mode("warn" if FIRST <= calls <= LAST else "default")
        return train_batch(*arguments)

    return call


warnings.simplefilter("always")
warnings.showwarning = show
step_loop.train_batch = watched(step_loop.train_batch)
runpy.run_path(str(ROOT / "pretrain" / "train.py"), run_name="__main__")
