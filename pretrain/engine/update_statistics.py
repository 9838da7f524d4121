"""Statistics of gradients and updates: norms, clipped updates, gradient noise scale, size of the update.

Nothing waits for the device until a row of metrics.jsonl reads the values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.callback import UpdatePart
from pretrain.engine.attachments import attachments
from pretrain.engine.clipping import AdaptiveClipping
from pretrain.engine.patches.pipeline import is_counted
from pretrain.engine.steps import data_parallel_size, global_grad_norm, loss_scale
from pretrain.engine.update import NOISE_SCALE, UPDATE_SIZE

_DECAY = 0.9  # of the moving averages of S and |G|^2, per measurement; both are averaged before the division
SAMPLE_ELEMENTS = 2**22  # of this rank's weights: their copy takes at most 16 MiB, during the optimizer's step only

OwnedWeights = Callable[[], list[torch.Tensor] | None]
"""Return flat views of the weights that this rank counts; None if they are not in memory (NVMe)."""


def clip_limit(engine: DeepSpeedEngine) -> float:
    """Return the largest global gradient norm of the last update; infinity without clipping."""
    adaptive = attachments(engine).update.find(AdaptiveClipping)
    return adaptive.limit_in_force if adaptive is not None else float(engine.gradient_clipping()) or math.inf


class GradientStats:
    """Statistics of the global gradient norms (before clipping) since the last call of `take`."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._restart()

    def _restart(self) -> None:
        self._largest = torch.full((), -math.inf, device=self._engine.device)
        self._clipped = torch.zeros((), device=self._engine.device)
        self._steps = 0

    def observe(self) -> None:
        """Add the last step. Call it after each `train_batch`; it does not synchronize the device."""
        self._steps += 1
        value = global_grad_norm(self._engine)
        if value is None or (not torch.is_tensor(value) and not math.isfinite(value)):
            return  # the update was skipped, or there is no norm
        norm = torch.as_tensor(value, dtype=torch.float32).to(self._engine.device, non_blocking=True)
        norm = torch.nan_to_num(norm, nan=-torch.inf, posinf=-torch.inf)  # of an update that the device has skipped
        self._largest = torch.fmax(self._largest, norm)
        if not getattr(self._engine.optimizer, "overflow", False):
            self._clipped += norm > clip_limit(self._engine)

    def take(self) -> dict[str, float | None]:
        """Return the values of a row of metrics.jsonl, and restart. Synchronizes the device.

        A value is None without clipping, or if no step had a finite norm.
        """
        largest, limit = float(self._largest), clip_limit(self._engine)
        row = {"grad_norm_max": largest if largest > -math.inf else None,
               "clip_norm": limit if limit < math.inf else None,
               "clip_rate": float(self._clipped) / self._steps if self._steps and limit < math.inf else None}
        self._restart()
        return row


def estimate(small: torch.Tensor, big: torch.Tensor, small_batch: int, big_batch: int) -> torch.Tensor:
    """Return unbiased estimates of [S, |G|^2] from the squared norms of the gradients of two batch sizes."""
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    return torch.stack([noise, signal])


class NoiseScale(UpdatePart):
    """Estimates the gradient noise scale: the batch size up to which more samples in a step save steps.

    McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1. For a batch of B
    samples the expected squared norm of the gradient is |G|^2 + S / B, where S is the trace of the covariance of a
    sample's gradient. Two batch sizes give both unknowns. Here b is the micro-batch and B is the global batch. The
    squared norm at b is the mean over all micro-batches of the step. The noise scale is S / |G|^2, in samples.

    It is measured every `interval` steps. No second gradient is stored.

    In these steps a hook on each parameter adds the squared norm of each micro-batch's gradient, before this gradient
    is accumulated or reduced. The norm of the global batch's gradient is DeepSpeed's. A measured step reads each
    gradient once more, and sums one number over the ranks. Nothing waits for the device until `value` is called.
    """

    order = NOISE_SCALE

    def __init__(self, engine: DeepSpeedEngine, *, interval: int) -> None:
        self._engine, self._interval = engine, interval
        self._averages = torch.zeros(2, device=engine.device)  # moving averages of S and |G|^2, both times 1 - 0.9^n
        self._hooks: list[Any] = []
        self._scale = 1.0  # loss scale of this step
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
        if not attachments(self._engine).recomputes:
            self._squares += torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square()

    def before_update(self) -> None:
        self._scale = loss_scale(self._engine)

    def after_update(self) -> None:
        if self._hooks:
            self._measure()
        self._prepare(self._engine.global_steps + 2)  # the engine counts this step after this function

    @torch.no_grad()
    def _measure(self) -> None:
        """Add a measurement to the averages, unless the update was skipped. Collective."""
        engine = self._engine
        steps, ranks = engine.gradient_accumulation_steps(), data_parallel_size(engine)
        dist.all_reduce(self._squares)  # also over pipeline stages and tensor-parallel ranks with other parameters
        if engine.optimizer.overflow:
            return
        # the engine divides the loss of each micro-batch by the number of accumulation steps
        small = self._squares * (steps / self._scale) ** 2 / (steps * ranks)
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


class UpdateSize(UpdatePart):
    """Measures the norm of the parameters, and the size of the update relative to it, in steps for which `is_due`.

    Both use the fp32 weights that the optimizer updates: in bf16 most updates are smaller than the spacing of the
    numbers.

    The relative size of the update is measured on a sample if a rank has more than SAMPLE_ELEMENTS weights: every k-th
    weight, with an odd k, so that the sample does not consist of a few columns of each matrix.

    Args:
        owned_weights: over all ranks, its tensors contain each parameter of the model exactly once.
    """

    order = UPDATE_SIZE

    def __init__(self, engine: DeepSpeedEngine, owned_weights: OwnedWeights) -> None:
        self.is_due = False
        self._engine, self._owned_weights = engine, owned_weights
        self._listed: tuple[list[int], list[torch.Tensor] | None] = [], None  # addresses, and the weights there
        self._weights: list[torch.Tensor] | None = None  # None: this step is not measured
        self._sample: list[torch.Tensor] = []  # of the weights before the update
        self._squares: torch.Tensor | None = None
        self._device = engine.device

    def take_squares(self) -> torch.Tensor:
        """Return this rank's sums of squares in the last step: parameters, sampled update, sampled parameters.

        They are float64 on the device, and NaN if they were not measured. Does not wait for the device.
        """
        squares, self._squares = self._squares, None
        return torch.full((3,), torch.nan, dtype=torch.float64, device=self._device) if squares is None else squares

    def before_update(self) -> None:
        self._weights = self._list_weights() if self.is_due else None
        if self._weights is not None:
            self._sample = self._copy_sample(self._weights)

    def after_update(self) -> None:
        if self._weights is not None:
            self._measure(self._weights, self._sample)
            self._weights, self._sample = None, []

    def _list_weights(self) -> list[torch.Tensor] | None:
        """List the weights again if the optimizer's tensors have moved: a list takes milliseconds."""
        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        # at ZeRO stage 3 these groups are filled only during a step
        addresses = [p.data_ptr() for group in optimizer.param_groups for p in group["params"]]
        if not addresses or addresses != self._listed[0]:
            self._listed = addresses, self._owned_weights()
        return self._listed[1]

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


def measure_updates(engine: DeepSpeedEngine, owned_weights: OwnedWeights) -> UpdateSize:
    """Make the engine measure the size of its updates in the steps that are due."""
    return attachments(engine).update.add(UpdateSize(engine, owned_weights))


def _stride(elements: int) -> int:
    """Return the smallest odd k with which every k-th of the elements is a sample of at most SAMPLE_ELEMENTS."""
    return -(-elements // SAMPLE_ELEMENTS) | 1
