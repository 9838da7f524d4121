"""Values that a search combines, and one combination of them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.hardware import Cluster

# choice of --offload -> (location of the optimizer, location of the parameters); "none": on the device
OFFLOADS = {"none": ("none", "none"), "optimizer_cpu": ("cpu", "none"), "all_cpu": ("cpu", "cpu"),
            "optimizer_nvme": ("nvme", "none"), "all_nvme": ("nvme", "nvme")}
# Parts that --recompute of train.py recomputes, without an interval. "offload": with an interval, the inputs of the
# recomputed groups are in host memory.
RECOMPUTE_CHOICES = ("none", "attention", "mlp", "offload")


@dataclass(frozen=True)
class Axes:
    """Values to combine; the search tries every combination. `default_axes` fills the empty fields."""

    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    offloads: tuple[str, ...] = tuple(OFFLOADS)
    pipeline_stages: tuple[int, ...] = ()
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    sequence_parallel_sizes: tuple[int, ...] = (1,)
    expert_parallel_sizes: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ()
    grad_accum_dtypes: tuple[str, ...] = ("",)  # "": the same as the precision
    activation_checkpoint_intervals: tuple[int, ...] = (0, 1)
    recomputes: tuple[str, ...] = RECOMPUTE_CHOICES[:3]
    micro_batch_sizes: tuple[int, ...] = ()  # empty: powers of two
    seq_lengths: tuple[int, ...] = (1024,)
    global_batch_size: int | None = None  # samples of a step
    gradient_accumulation_steps: int | None = None


@dataclass(frozen=True)
class Combination:
    """One value of each axis, without the batch sizes."""

    zero_stage: int
    offload: str  # key of OFFLOADS
    pipeline_stages: int
    tensor_parallel_size: int
    sequence_parallel_size: int
    expert_parallel_size: int
    precision: str
    grad_accum_dtype: str
    activation_checkpoint_interval: int
    recompute: str  # one of RECOMPUTE_CHOICES
    seq_length: int

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.pipeline_stages * self.tensor_parallel_size * self.sequence_parallel_size


def default_axes(axes: Axes, cluster: Cluster, shape: ModelShape | None) -> Axes:
    """Fill the empty fields: pipelines of 1 to 64 stages that ranks and layers allow, and bf16 if the GPU has it.

    Without a shape only model states are estimated. Recomputation and micro-batches do not change states, so that a
    single value of each is enough.
    """
    axes = replace(axes, precisions=axes.precisions or ("bf16" if cluster.gpu.knows_bf16 else "fp16",))
    if shape is None:
        return replace(axes, pipeline_stages=axes.pipeline_stages or (1,), activation_checkpoint_intervals=(0,),
                       recomputes=("none",), micro_batch_sizes=(1,), gradient_accumulation_steps=1)
    pipeline_stages = tuple(stages for stages in (1, 2, 4, 8, 16, 32, 64)
                            if cluster.world_size % stages == 0 and stages <= shape.num_layers)
    return replace(axes, pipeline_stages=axes.pipeline_stages or pipeline_stages)


def combinations_of(axes: Axes) -> Iterator[Combination]:
    """Yield every combination of the axes' values. An interval and a recomputed part exclude each other."""
    columns: list[tuple[Any, ...]] = [
        axes.zero_stages, axes.offloads, axes.pipeline_stages, axes.tensor_parallel_sizes,
        axes.sequence_parallel_sizes, axes.expert_parallel_sizes, axes.precisions, axes.grad_accum_dtypes,
        axes.activation_checkpoint_intervals, axes.recomputes, axes.seq_lengths]
    for values in itertools.product(*columns):
        choice = Combination(*values)
        possible = ("none", "offload") if choice.activation_checkpoint_interval else ("none", "attention", "mlp")
        if choice.recompute in possible:
            yield choice
