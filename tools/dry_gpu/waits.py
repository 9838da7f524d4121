"""Train, and count where the host waits for the device: dry-gpu python tools/dry_gpu/waits.py FLAGS of pretrain.train.

DRY_GPU_WAITS names the file of the result (waits.txt), with one line for each place: the number, then the innermost
three frames outside of torch. The difference of two lengths of a run is what the additional steps cost.
"""

import atexit
import os
import runpy
import sys
import traceback
import warnings
from collections import Counter
from typing import Any

import torch

FRAMES = 3
OWN_FILES = ("waits.py", "warnings.py")
places: Counter[str] = Counter()


def count(message: Any, *args: Any, **kwargs: Any) -> None:
    """Count a warning of torch.cuda.set_sync_debug_mode by its place."""
    if "synchroniz" not in str(message):
        return
    frames = [frame for frame in traceback.extract_stack()
              if "/torch/" not in frame.filename and os.path.basename(frame.filename) not in OWN_FILES]
    places[" < ".join(f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno} {frame.name}"
                      for frame in reversed(frames[-FRAMES:]))] += 1


def write() -> None:
    """Write the counts, the most frequent place first."""
    with open(os.environ.get("DRY_GPU_WAITS", "waits.txt"), "w") as file:
        file.writelines(f"{number:6} {place}\n" for place, number in places.most_common())


def main() -> None:
    """Run pretrain.train with this process's flags."""
    warnings.showwarning = count
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode(1)
    end_now = os._exit

    def write_and_exit(code: int) -> Any:  # a rank ends by os._exit, which runs no function of atexit
        write()
        end_now(code)

    os._exit = write_and_exit  # type: ignore[assignment]
    atexit.register(write)
    sys.argv = ["pretrain.train", *sys.argv[1:]]
    runpy.run_module("pretrain.train", run_name="__main__")


if __name__ == "__main__":
    main()
