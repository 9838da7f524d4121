"""Defect R: wrong gradients under sequence parallelism with ZeRO-3.

Guarded by tests/distributed/test_upstream.py, test_r_*.
"""

from collections.abc import Sequence

import torch
from deepspeed import DeepSpeedEngine


def sum_gradients_of_shards(engine: DeepSpeedEngine) -> None:
    """Defect R: sum the gradients of the ranks that share a sequence, and average only over data-parallel ranks.

    DeepSpeed 0.19.8: `__avg_scatter_grads` (runtime/zero/stage3.py), its default, averages over all ranks. Gradients
    are then sequence_parallel_size times too small. ZeRO-1, ZeRO-2, and ZeRO-3 with "reduce_scatter": false divide by
    the data-parallel ranks only. The returned number of ranks is what this function divides by.
    """
    optimizer = engine.optimizer
    average_over = optimizer._gradient_averaging_world_size

    def gradient_averaging_world_size(parameters: Sequence[torch.nn.Parameter], ranks: int) -> float:
        size: int = average_over(parameters, ranks)
        return size / optimizer.sequence_parallel_size

    if optimizer.reduce_scatter:
        optimizer._gradient_averaging_world_size = gradient_averaging_world_size
