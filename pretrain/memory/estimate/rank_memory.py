"""How much memory a layout takes, in closed form: nothing is built, nothing imported, a millisecond a layout."""

from dataclasses import dataclass
from functools import lru_cache

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.phases import step_phases
from pretrain.memory.estimate.pipeline_stages import Group, rank_groups
from pretrain.memory.estimate.states import (
    elements_touched,
    engine_kind,
    master_bytes,
    moment_bytes,
    optimizer_place,
    pinning_loss,
    states_of_rank,
)
from pretrain.memory.footprint import Footprint

# Of what is allocated and freed again on CUDA (everything but states and fixed buffers): what its caching allocator
# cannot use for lack of contiguous blocks. An assumption, not a measurement; the CPU's tensors have no such loss.
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that needs the most on its device."""

    layout: Layout
    shape: ModelShape | None  # None: states only, by the ZeRO paper's formula
    num_parameters: int  # of the whole model
    steady: Footprint  # between two micro-batches: states and fixed buffers
    peak: Footprint  # at the worst moment, with a margin for what the allocators lose
    phase: str  # the phase of the step with the largest footprint: see phases.py; "states" without a shape
    pipeline_stage: int = 0  # the worst rank's pipeline stage
    zero_rank: int = 0  # and its place among the ranks that ZeRO divides over

    @property
    def device_bytes(self) -> int:
        """The most on the device."""
        return self.peak.total(location="device")

    @property
    def host_bytes(self) -> int:
        """In host memory, pinned or not."""
        return self.peak.total(location="pinned") + self.peak.total(location="host")

    @property
    def nvme_bytes(self) -> int:
        """In files on NVMe."""
        return self.peak.total(location="nvme")


def estimate_memory(shape: ModelShape | None, layout: Layout, *, num_parameters: float | None = None,
             fragmentation: float = FRAGMENTATION) -> MemoryEstimate:
    """The memory of one rank, the one that needs the most.

    Args:
        shape: the model; None: `num_parameters` alone, for states without activations, as in the ZeRO paper.
        fragmentation: share of the CUDA bytes that come and go, added as the margin.

    Raises:
        ConfigError: neither shape nor number, a layout that cannot be, more stages than layers.
    """
    layout.check()
    if shape is None:
        if not num_parameters or num_parameters < 0:
            raise ConfigError("--num_parameters", found=num_parameters, expected="a number above 0, or --model")
        states = paper_states(num_parameters, layout)
        return MemoryEstimate(layout, None, round(num_parameters), states, states, "states")
    if layout.seq_length > shape.max_positions and shape.position == "learned":
        raise ConfigError("--seq_length", found=layout.seq_length,
                          expected=f"at most {shape.max_positions}, the positions of the model")
    ranks = [estimate_rank(shape, layout, pipeline_stage=stage, zero_rank=worst_zero_rank(shape, layout, stage),
                           fragmentation=fragmentation) for stage in range(layout.pipeline_stages)]
    return max(ranks, key=lambda rank: rank.device_bytes)




def estimate_rank(shape: ModelShape, layout: Layout, *, pipeline_stage: int = 0, zero_rank: int = 0,
                  fragmentation: float = FRAGMENTATION) -> MemoryEstimate:
    """The memory of one given rank. Raises ConfigError, as `estimate`."""
    steady = states_of_rank(shape, layout, pipeline_stage=pipeline_stage, zero_rank=zero_rank)
    moment, peak = max(step_phases(shape, layout, pipeline_stage=pipeline_stage, zero_rank=zero_rank),
                       key=lambda item: item[1].total(location="device"))
    if layout.device_kind == "cuda":
        passing = peak.total(location="device") - steady.total(location="device")
        peak += Footprint.of([
            (("margin", "device"), round(max(0, passing) * fragmentation)),
            (("margin", "pinned"), pinning_loss(shape, layout, pipeline_stage=pipeline_stage, zero_rank=zero_rank))])
    return MemoryEstimate(layout, shape, shape.num_parameters(), steady, peak, moment, pipeline_stage, zero_rank)


def worst_zero_rank(shape: ModelShape, layout: Layout, pipeline_stage: int = 0) -> int:
    """The ZeRO rank with the largest states: ranks differ at stage 2 only, which keeps gradients of whole parameters,
    those of the parameters that lie in a rank's part, if only in part.
    """
    if layout.zero_stage != 2 or engine_kind(layout) != "zero12":
        return 0
    return _most_touched(rank_groups(shape, layout, pipeline_stage), layout.zero_size, layout.parameter_alignment,
                         layout.element_bytes)


@lru_cache(maxsize=256)
def _most_touched(groups: tuple[Group, ...], ranks: int, aligned: bool, element_bytes: int) -> int:
    layout = Layout(zero_stage=2, parameter_alignment=aligned, precision="bf16" if element_bytes == 2 else "fp32")
    kept = [sum(elements_touched(group, layout, rank % group.ranks) for group in groups) for rank in range(ranks)]
    return kept.index(max(kept))


def paper_states(num_parameters: float, layout: Layout) -> Footprint:
    """The formula of the ZeRO paper (arXiv 1910.02054, section 3.1): 2 + 2 + K bytes a parameter, K = 12 for Adam.

    Stage 1 divides K by the ranks, stage 2 the gradients too, stage 3 the parameters too. In fp32 there are no master
    weights. Offloaded states lie where the layout says; tensor and pipeline parallelism divide everything.
    """
    ranks, local = layout.zero_size, num_parameters / (layout.pipeline_stages * layout.tensor_parallel_size)
    stage, element = layout.zero_stage, layout.element_bytes
    part = local / ranks
    place = {"none": "device", "cpu": optimizer_place(layout), "nvme": "nvme"}[layout.offload_optimizer]
    params = {"none": "device", "cpu": "pinned", "nvme": "nvme"}[layout.offload_param]
    divided = part if stage >= 1 else local
    masters = master_bytes(layout) if layout.precision != "fp32" else 0
    return Footprint.of([
        (("parameters", params), round((part if stage == 3 else local) * element)),
        (("gradients", "device" if stage < 2 else place), round((part if stage >= 2 else local)
                                                                * layout.grad_accum_bytes)),
        (("master_weights", place), round(divided * masters)),
        (("optimizer_states", place), round(divided * moment_bytes(layout)))])
