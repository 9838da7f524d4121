"""Program `signals_itself.py SIGNAL STEP FLAGS`: train.py with the flags. The last rank gets the signal after STEP."""

import os
import sys
from typing import Any

import torch

from pretrain import step_loop
from pretrain.distributed.process import end_process
from pretrain.train import main


def send_after(number: int, step: int) -> None:
    """Send the signal to this process before the step that follows `step`."""
    train_batch = step_loop.train_batch

    def train_batch_with_signal(engine: Any, micro_batches: list[Any]) -> torch.Tensor:
        if engine.global_steps == step and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), number)
        return train_batch(engine, micro_batches)

    step_loop.train_batch = train_batch_with_signal


if __name__ == "__main__":
    send_after(int(sys.argv[1]), int(sys.argv[2]))
    end_process(main(sys.argv[3:]))
