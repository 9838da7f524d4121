"""Program `recorded_batches.py FOLDER FLAGS`: one rank of train.py that saves the tensors of each step.

FOLDER/STEP_RANK.pt has the micro-batches that `train_batch` received, the newest ones of each step.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from pretrain import step_loop
from pretrain.distributed.process import end_process
from pretrain.train import main


def record(folder: Path) -> None:
    """Save the arguments of each call of train_batch."""
    train_batch = step_loop.train_batch

    def recorded(engine: Any, micro_batches: list[Any]) -> torch.Tensor:
        step = engine.global_steps + 1
        torch.save(micro_batches, folder / f"{step}_{os.environ['RANK']}.pt")
        return train_batch(engine, micro_batches)

    step_loop.train_batch = recorded


if __name__ == "__main__":
    record(Path(sys.argv[1]))
    end_process(main(sys.argv[2:]))
