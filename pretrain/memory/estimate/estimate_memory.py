"""Estimate the memory of one rank by formulas, in a few milliseconds: no model is built, torch is not imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.phases import step_phases
from pretrain.memory.estimate.rank import (
    ParameterGroup,
    Rank,
    distinct_stages,
    master_weight_bytes,
    optimizer_location,
    optimizer_state_bytes,
    optimizer_wrapper,
)
from pretrain.memory.estimate.states import overlapping_elements, pinning_loss, states_of_rank
from pretrain.memory.footprint import Footprint
from pretrain.model.description import ModelConfig

# Fraction of the temporary CUDA memory (everything except states and fixed buffers) that torch's caching allocator
# cannot use for lack of contiguous blocks, even where it returns free pages (see _reserved_bytes). An assumption, not a
# measurement. CPU tensors have no such loss.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank, by default of the rank that needs the most on its device."""

    layout: Layout
    steady: Footprint  # between two micro-batches: states and fixed buffers
    peak: Footprint  # in the phase that needs the most memory; includes a margin that the allocators cannot use
    phase: str  # name of the phase of `peak` (see phases.py); "states" by the ZeRO paper's formula
    pipeline_stage: int = 0
    zero_rank: int = 0  # the rank's index among the ranks that ZeRO divides over
    reserved_bytes: int = 0  # that CUDA's caching allocator takes from the device, without the margin; 0 on a CPU

    @property
    def device_bytes(self) -> int:
        """Peak bytes on the device."""
        return self.peak.total(location="device")

    @property
    def host_bytes(self) -> int:
        """Peak bytes in host memory, pinned or not."""
        return self.peak.total(location="pinned") + self.peak.total(location="host")

    @property
    def nvme_bytes(self) -> int:
        """Peak bytes in files on NVMe."""
        return self.peak.total(location="nvme")

    @property
    def needed_bytes(self) -> int:
        """Peak bytes of the memory that may run out: the device's memory, on a CPU the host's."""
        return self.device_bytes + self.host_bytes if self.layout.device_kind == "cpu" else self.device_bytes


def estimate_memory(model: ModelConfig | None, layout: Layout, *,
                    num_parameters: float | None = None) -> MemoryEstimate:
    """Estimate the memory of the rank that needs the most on its device.

    Args:
        model: None: only `num_parameters` is known, and the estimate has states without activations, as in the ZeRO
            paper.
        num_parameters: used only without a model.

    Raises:
        ConfigError: neither model nor num_parameters is given, the layout is impossible, it has more pipeline stages
            than layers, or its sequences are longer than the model's learned positions.
    """
    layout.check()
    if model is None:
        if not num_parameters or num_parameters < 0:
            raise ConfigError("--num_parameters", found=num_parameters, expected="a number above 0, or --model")
        states = paper_states(num_parameters, layout)
        return MemoryEstimate(layout, states, states, "states")
    if layout.seq_length > model.max_positions and model.position == "learned":
        raise ConfigError("--seq_length", found=layout.seq_length,
                          expected=f"at most {model.max_positions}, the positions of the model")
    estimates = [estimate_rank(Rank(model, layout, stage, largest_zero_rank(model, layout, stage)))
                 for stage in distinct_stages(model, layout)]
    return max(estimates, key=lambda estimate: estimate.device_bytes)


def estimate_rank(rank: Rank) -> MemoryEstimate:
    """Estimate the memory of a given rank. Raises ConfigError, as `estimate_memory` does."""
    steady = states_of_rank(rank)
    phases = list(step_phases(rank, steady))
    phase, peak = max(phases, key=lambda item: item[1].total(location="device"))
    reserved = 0
    if rank.layout.device_kind == "cuda":
        temporary = peak.total(location="device") - steady.total(location="device")
        peak += Footprint.of([(("margin", "device"), round(max(0, temporary) * FRAGMENTATION)),
                              (("margin", "pinned"), pinning_loss(rank) if steady.total(location="pinned") else 0)])
        reserved = _reserved_bytes(phases, steady)
    return MemoryEstimate(rank.layout, steady, peak, phase, rank.pipeline_stage, rank.zero_rank, reserved)


def _reserved_bytes(phases: Sequence[tuple[str, Footprint]], steady: Footprint) -> int:
    """Bytes that torch's caching allocator holds at the end of a step, without rounding.

    The optimizer step copies gradients into flat tensors. They need contiguous memory, which is not what the backward
    pass has freed: gradients lie between the activations. So they are allocated in addition to the other phases' peak.
    Without memory for it, the allocator returns free pages, and the step still fits: `device_bytes` decides.
    """
    sizes = [(name, peak.total(location="device")) for name, peak in phases]
    step = max(size for name, size in sizes if name == "step")
    others = max((size for name, size in sizes if name != "step"), default=0)
    return max(step, others + max(0, step - steady.total(location="device")))


def largest_zero_rank(model: ModelConfig, layout: Layout, pipeline_stage: int = 0) -> int:
    """Return the ZeRO rank with the largest states.

    Ranks differ at ZeRO stage 2 only: a rank keeps the gradients of all parameters that overlap its part of the flat
    tensor.
    """
    if layout.zero_stage != 2 or optimizer_wrapper(layout) != "zero12":
        return 0
    return _largest_overlap(Rank(model, layout, pipeline_stage).groups, layout.zero_size, layout.parameter_alignment,
                            layout.element_bytes)


@lru_cache(maxsize=256)
def _largest_overlap(groups: tuple[ParameterGroup, ...], ranks: int, aligned: bool, element_bytes: int) -> int:
    layout = Layout(zero_stage=2, parameter_alignment=aligned, precision="bf16" if element_bytes == 2 else "fp32")
    elements = [sum(overlapping_elements(group, layout, rank % group.ranks) for group in groups)
                for rank in range(ranks)]
    return elements.index(max(elements))


def paper_states(num_parameters: float, layout: Layout) -> Footprint:
    """Return the model states by the ZeRO paper's formula (arXiv 1910.02054, section 3.1).

    A parameter takes 2 + 2 + K bytes: weight, gradient, and K = 12 for Adam in mixed precision. ZeRO stage 1 divides K
    by the number of ranks; stage 2 also divides the gradients, and stage 3 the weights. In fp32 there are no master
    weights. Tensor and pipeline parallelism divide all states. Offloaded states count in host memory or on NVMe.
    """
    local = num_parameters / (layout.pipeline_stages * layout.tensor_parallel_size)
    divided = local / layout.zero_size
    optimizer_at = {"none": "device", "cpu": optimizer_location(layout), "nvme": "nvme"}[layout.offload_optimizer]
    parameters_at = {"none": "device", "cpu": "pinned", "nvme": "nvme"}[layout.offload_param]
    parameters = divided if layout.zero_stage == 3 else local
    gradients = divided if layout.zero_stage >= 2 else local
    optimizer = divided if layout.zero_stage >= 1 else local
    master = master_weight_bytes(layout) if layout.precision != "fp32" else 0
    return Footprint.of([
        (("parameters", parameters_at), round(parameters * layout.element_bytes)),
        (("gradients", optimizer_at if layout.zero_stage >= 2 else "device"),
         round(gradients * layout.grad_accum_bytes)),
        (("master_weights", optimizer_at), round(optimizer * master)),
        (("optimizer_states", optimizer_at), round(optimizer * optimizer_state_bytes(layout)))])
