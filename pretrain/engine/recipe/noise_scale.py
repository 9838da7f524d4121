"""Estimate the gradient noise scale: the batch size up to which more samples in a step save steps.

McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1. For a batch of B samples
the expected squared norm of the gradient is |G|^2 + S / B, where S is the trace of the covariance of a sample's
gradient. Two batch sizes give both unknowns. Here b is the micro-batch and B is the global batch. The squared norm at b
is the mean over all micro-batches of the step. The noise scale is S / |G|^2, in samples.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.engine.patches.pipeline import is_counted
from pretrain.engine.steps import data_parallel_size, loss_scale

_DECAY = 0.9  # of the moving averages of S and |G|^2, per measurement; both are averaged before the division


def estimate(small: torch.Tensor, big: torch.Tensor, small_batch: int, big_batch: int) -> torch.Tensor:
    """Return unbiased estimates of [S, |G|^2] from the squared norms of the gradients of two batch sizes."""
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    return torch.stack([noise, signal])


class NoiseScale:
    """Measures every `interval` steps. No second gradient is stored.

    In these steps a hook on each parameter adds the squared norm of each micro-batch's gradient, before this gradient
    is accumulated or reduced. The norm of the global batch's gradient is that of DeepSpeed. A measured step reads each
    gradient once more, and sums one number over the ranks. Nothing waits for the device until `value` is called.
    """

    def __init__(self, engine: DeepSpeedEngine, *, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._averages = torch.zeros(2, device=engine.device)  # moving averages of S and |G|^2, both times 1 - 0.9^n
        self._hooks: list[Any] = []
        self._update = engine.optimizer.step
        engine.optimizer.step = functools.wraps(self._update)(lambda *args, **kwargs: self._step(*args, **kwargs))
        self._prepare(engine.global_steps + 1)

    def _prepare(self, next_step: int) -> None:
        """Add the hooks if the next step is a measured one. Steps are numbered from 1."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._squares = [], torch.zeros((), device=self._engine.device)
        if next_step % self._interval == 0:
            self._hooks = [parameter.register_hook(self._add) for parameter in self._engine.module.parameters()
                           if parameter.requires_grad and is_counted(self._engine, parameter)]

    def _add(self, grad: torch.Tensor) -> None:
        self._squares += torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        scale = loss_scale(self._engine)
        result = self._update(*args, **kwargs)
        if self._hooks:
            self._measure(scale)
        self._prepare(self._engine.global_steps + 2)  # the engine counts this step after this function
        return result

    @torch.no_grad()
    def _measure(self, scale: float) -> None:
        """Add a measurement to the averages, unless the update was skipped. Collective."""
        engine = self._engine
        steps, ranks = engine.gradient_accumulation_steps(), data_parallel_size(engine)
        dist.all_reduce(self._squares)  # also over pipeline stages and tensor-parallel ranks with other parameters
        if engine.optimizer.overflow:
            return
        # the engine divides the loss of each micro-batch by the number of accumulation steps
        small = self._squares * (steps / scale) ** 2 / (steps * ranks)
        big = torch.as_tensor(engine.optimizer._global_grad_norm, dtype=torch.float32).to(engine.device) ** 2
        micro_batch = engine.train_micro_batch_size_per_gpu()
        measured = estimate(small, big, micro_batch, micro_batch * steps * ranks)
        averages = _DECAY * self._averages + (1 - _DECAY) * measured
        self._averages = torch.where(averages.isfinite().all(), averages, self._averages)

    def value(self) -> float | None:
        """Return the noise scale in samples; None before the first measurement and if |G|^2 is lost in the noise.

        Synchronizes the device.
        """
        noise, signal = self._averages.tolist()
        return noise / signal if signal > 0 else None

    def state(self) -> list[float]:
        """Return the moving averages, for a checkpoint."""
        return list(self._averages.tolist())

    def set_state(self, averages: Sequence[float] | None) -> None:
        """Continue from the averages of a checkpoint; None: without any. The engine has loaded its counters."""
        self._averages = torch.tensor(averages or [0.0, 0.0], device=self._engine.device)
        self._prepare(self._engine.global_steps + 1)
