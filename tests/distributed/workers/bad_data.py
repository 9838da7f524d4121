"""Program `bad_data.py FAULTS.json FLAGS`: one rank of train.py, in which some samples give bad losses.

FAULTS.json: {"factors": {first sample of a global batch: factor of the loss, such as "nan"}, "rank": the only rank
that has these factors, or null: all ranks, "kill_in": function "module:name", whose first call kills the process, or
null}.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pretrain.data.loader import Loader, MicroBatch
from pretrain.distributed.process import end_process
from pretrain.train import main


def spoil(faults: dict[str, Any]) -> None:
    """Multiply the loss weights of the given global batches of the training data."""
    factors = {int(first): float(factor) for first, factor in faults["factors"].items()}
    step = Loader.step

    def spoiled(self: Loader, consumed_samples: int) -> list[MicroBatch]:
        micro_batches = step(self, consumed_samples)
        if self.dataset.name == "train" and consumed_samples in factors \
                and faults.get("rank") in (None, int(os.environ["RANK"])):
            for _, (_, weights_BT) in micro_batches:
                weights_BT.mul_(factors[consumed_samples])
        return micro_batches

    Loader.step = spoiled  # type: ignore[method-assign]


def kill_in(function: str) -> None:
    """Make the first call of a function kill this process."""
    module, _, name = function.partition(":")

    def kill(*arguments: Any, **settings: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(importlib.import_module(module), name, kill)


if __name__ == "__main__":
    faults = json.loads(Path(sys.argv[1]).read_text())
    spoil(faults)
    if faults.get("kill_in"):
        kill_in(faults["kill_in"])
    end_process(main(sys.argv[2:]))
