"""Count where the host waits for the device in steps of a run that are not logged.

    DRY_GPU_WAITS=waits.txt dry-gpu ds-pretrain --log_interval 100 ...
    DRY_GPU_WAITS=waits.txt python tools/dry_gpu/waits.py --log_interval 100 FLAGS of pretrain.train

The second command needs no dry GPU: it also counts on a real one, with one rank. The file has a line for each place:
waits per step, kind, and the innermost three frames outside of torch. Rank 1 writes waits.txt.1, and so on. With
DRY_GPU_COUNTERS, a line has the kernels of all ranks, which belong to these steps if there is one rank.

kinds   read: an operator that returns a value to the host, or copies one; device, event: a call that waits
steps   FIRST to LAST of the start: the flight recorder has chosen its interval before
"""

import os
import re
import runpy
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

FIRST, LAST, FRAMES = 10, 13, 3
OWN_FILES = ("waits.py", "warnings.py", "cuda_accelerator.py", "nvtx.py")
places: Counter[str] = Counter()
is_counting = False


def kernels() -> int:
    """Return the kernels that the dry GPU has launched; 0 if it does not count them."""
    path = os.environ.get("DRY_GPU_COUNTERS")
    return int(np.fromfile(path, dtype=np.int64)[0]) if path else 0


def count(kind: str) -> None:
    """Count a wait by its place."""
    if not is_counting:
        return
    frames = [frame for frame in traceback.extract_stack()
              if "/torch/" not in frame.filename and os.path.basename(frame.filename) not in OWN_FILES]
    places[f"{kind} " + " < ".join(
        f"{re.sub(r'.*/(?=(pretrain|deepspeed)/)', '', frame.filename)}:{frame.lineno} {frame.name}"
        for frame in reversed(frames[-FRAMES:]))] += 1


def counted(kind: str, wait: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        count(kind)
        return wait(*args, **kwargs)

    return call


def write(launched: int) -> None:
    """Write the waits and kernels per step, the most frequent place first."""
    if launched:
        places["kernels"] = launched
    rank = int(os.environ.get("RANK", "0"))
    with open(os.environ.get("DRY_GPU_WAITS", "waits.txt") + (f".{rank}" if rank else ""), "w") as file:
        file.writelines(f"{number / (LAST - FIRST + 1):.2f} {place}\n" for place, number in places.most_common())


def watch(step_loop: Any) -> None:
    """Count from the step FIRST until the step LAST was trained and observed, in the loop of this module."""
    train_batch, calls, before = step_loop.train_batch, 0, 0

    def watched(*args: Any) -> Any:
        nonlocal calls, before
        global is_counting
        calls += 1
        if calls == LAST + 1:
            write(kernels() - before)
        before = kernels() if calls == FIRST else before
        is_counting = FIRST <= calls <= LAST
        torch.cuda.set_sync_debug_mode(int(is_counting))
        return train_batch(*args)

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message):
            count("read")

    warnings.simplefilter("always")
    warnings.showwarning = show
    torch.cuda.synchronize = counted("device", torch.cuda.synchronize)
    torch.cuda.Event.synchronize = counted("event", torch.cuda.Event.synchronize)  # type: ignore[method-assign]
    step_loop.train_batch = watched


if __name__ == "__main__":
    from pretrain import step_loop

    if step_loop.train_batch.__name__ != "watched":  # on a dry GPU, the import has done it
        watch(step_loop)
    runpy.run_module("pretrain.train", run_name="__main__")
