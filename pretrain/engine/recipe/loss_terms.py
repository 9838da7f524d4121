"""The terms of the training loss in addition to the cross-entropy, as values of a row of metrics.jsonl."""

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.engine.steps import data_parallel_size, tensor_parallel_size


def loss_term_values(engine: DeepSpeedEngine) -> dict[str, float]:
    """Return {"z_loss": coefficient * mean squared logsumexp of the training tokens since the last call}.

    Empty without --z_loss. Otherwise collective; synchronizes the device.
    """
    loss = engine.module.training_loss
    if not loss.terms.z_loss:
        return {}
    squares = loss.take_squares()  # None on all but the last pipeline stage
    total = torch.zeros((), device=engine.device) if squares is None else squares.float()
    dist.all_reduce(total)
    copies = data_parallel_size(engine) * tensor_parallel_size(engine)  # tensor-parallel ranks have equal values
    return {"z_loss": loss.terms.z_loss * float(total) / copies}
