"""Scaling of the peak learning rate with the global batch size."""

import math

LR_SCALINGS = ("linear", "sqrt")


def rate_factor(scaling: str | None, *, batch: int, reference_batch: int | None) -> float:
    """Return the factor of the peak rate: batch / reference_batch, its square root, or 1 without scaling.

    linear: arXiv 1706.02677, for SGD. sqrt: arXiv 2205.10287, for Adam. The batch is the final one of --batch_schedule.
    """
    if scaling is None or reference_batch is None:
        return 1.0
    ratio = batch / reference_batch
    return ratio if scaling == "linear" else math.sqrt(ratio)
