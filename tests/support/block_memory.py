"""Memory of a block on a CPU, as the tracker of storages measures it."""

import torch

from pretrain.memory.storage_tracker import StorageTracker
from pretrain.model.layers.block import Block


def measure_block(block: Block, x_BTD: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that a block keeps for its backward pass, and the peak of that pass.

    Parameters, their gradients, input and output are not counted.
    """
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with StorageTracker() as tracker:
        for tensor in (*block.parameters(), *(parameter.grad for parameter in block.parameters())):
            tracker.add(tensor)
        block(x_BTD.detach())  # allocates the rotary tables and the masks before the measurement
        before = tracker.live_bytes
        y_BTD = block(x_BTD * 1)
        before += y_BTD.nbytes
        kept = tracker.live_bytes - before
        tracker.reset_peak()
        y_BTD.backward(torch.ones_like(y_BTD))
    return kept, tracker.peak_bytes - before
