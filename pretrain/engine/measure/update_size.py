"""Norm of the parameters, and size of the update relative to it, in chosen steps.

Both use the fp32 weights that the optimizer updates: in bf16 most updates are smaller than the spacing of the numbers.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

SAMPLE_ELEMENTS = 2**22  # of this rank's weights: their copy takes at most 16 MiB, during the optimizer's step only

OwnedWeights = Callable[[], list[torch.Tensor] | None]
"""Return flat views of the weights that this rank counts; None if they are not in memory (NVMe)."""


class UpdateSize:
    """Measures the update of steps for which `is_due` returns True.

    The relative size of the update is that of a sample if a rank has more than SAMPLE_ELEMENTS weights: every k-th
    weight, with an odd k, so that the sample does not consist of a few columns of each matrix.

    Args:
        owned_weights: over all ranks, its tensors contain each parameter of the model exactly once.
    """

    def __init__(self, engine: DeepSpeedEngine, owned_weights: OwnedWeights, is_due: Callable[[], bool]) -> None:
        self._owned_weights, self._is_due = owned_weights, is_due
        self._squares: torch.Tensor | None = None
        self._device = engine.device
        self._update = engine.optimizer.step
        # A function, because a bound method cannot keep the attributes that torch's schedules look for.
        engine.optimizer.step = functools.wraps(self._update)(lambda *args, **kwargs: self._step(*args, **kwargs))

    def take_squares(self) -> torch.Tensor:
        """Return this rank's sums of squares in the last step: parameters, sampled update, sampled parameters.

        They are float64 on the device, and NaN if they were not measured. Does not wait for the device.
        """
        squares, self._squares = self._squares, None
        return torch.full((3,), torch.nan, dtype=torch.float64, device=self._device) if squares is None else squares

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        weights = self._owned_weights() if self._is_due() else None
        if weights is None:
            return self._update(*args, **kwargs)
        sample = self._copy_sample(weights)
        result = self._update(*args, **kwargs)
        self._measure(weights, sample)
        return result

    @torch.no_grad()
    def _copy_sample(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        stride = _stride(sum(weight.numel() for weight in weights))
        return [weight[::stride].clone() for weight in weights]

    @torch.no_grad()
    def _measure(self, weights: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        """Compute the sums of squares after the update. Overwrites the sample from before it."""
        stride = _stride(sum(weight.numel() for weight in weights))
        sampled = self._sum_of_squares(before)
        for old, weight in zip(before, weights, strict=True):
            old.sub_(weight[::stride])
        self._squares = torch.stack([self._sum_of_squares(weights), self._sum_of_squares(before), sampled])

    def _sum_of_squares(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for tensor in tensors:
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
            total += norm.to(device=self._device, dtype=torch.float64).square()
        return total


def _stride(elements: int) -> int:
    """Return the smallest odd k with which every k-th of the elements is a sample of at most SAMPLE_ELEMENTS."""
    return -(-elements // SAMPLE_ELEMENTS) | 1
