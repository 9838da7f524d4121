"""Training steps and gradients outside of the step loop: for checks and examinations on an engine."""

import math

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

from pretrain.data.loader import MicroBatch
from pretrain.engine.optimizer import set_learning_rate
from pretrain.engine.steps import tensor_parallel_size, train_batch
from pretrain.engine.update_guard import FP16_OVERFLOW, SkippedUpdate, skipped_update

_MOST_OVERFLOWS = 30  # of fp16's loss scale, which is halved after each


def train_without_overflow(engine: DeepSpeedEngine, batches: list[MicroBatch],
                           lr: float | None = None) -> tuple[float, SkippedUpdate | None]:
    """Repeat a training step until fp16 does not overflow: each overflow halves the loss scale.

    `lr`: the learning rate; None: the engine's. Returns the loss, and why the update was skipped.
    """
    for _ in range(_MOST_OVERFLOWS):
        if lr is not None:
            set_learning_rate(engine, lr)
        loss, skipped = float(train_batch(engine, batches)), skipped_update(engine)
        if skipped is None or skipped.reason != FP16_OVERFLOW or skipped.is_bad:
            break
    return loss, skipped


def norm_of_all_parts(engine: DeepSpeedEngine, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> float:
    """Return the norm of the complete gradient, of which each tensor-parallel rank may hold a part; collective."""
    square = gradient.detach().float().square().sum()
    if is_model_parallel_parameter(parameter) and tensor_parallel_size(engine) > 1:
        dist.all_reduce(square, group=bwc_tensor_model_parallel_group(engine.mpu))
    return math.sqrt(square)
