"""Run pretrain/train.py with the given flags. Before step 5, the last rank flips a bit of a weight's copy.

At ZeRO-0 nothing overwrites the copy: each rank updates its own.
"""

import sys

import torch
from deepspeed import DeepSpeedEngine

from pretrain import step_loop
from pretrain.data.loader import MicroBatch
from pretrain.distributed.process import end_process
from pretrain.train import main
from tests.distributed.workers.worker import flip_bit

train_batch = step_loop.train_batch


def train_batch_after_flip(engine: DeepSpeedEngine, micro_batches: list[MicroBatch]) -> torch.Tensor:
    if engine.global_steps == 4:
        flip_bit(engine, "mlp.up.weight", bit=20)
    return train_batch(engine, micro_batches)


if __name__ == "__main__":
    step_loop.train_batch = train_batch_after_flip
    end_process(main(sys.argv[1:]))
