"""Bytes that one rank transfers in a step: to and from other ranks, over PCIe, and to and from local disks.

The counts follow DeepSpeed 0.19.8. At ZeRO stages 1 and 2 it transfers more than the ZeRO paper says: it all-reduces
the gradients, and each rank keeps its part (runtime/zero/stage_1_and_2.py, allreduce_and_scatter). Norms and losses are
not counted. tests/extensions/planner/test_traffic.py compares the counts with real engines.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from pretrain.config.layout import DTYPE_BYTES, Layout
from pretrain.extensions.planner.step_time.block_traffic import Transfer, block_transfers, hidden_bytes
from pretrain.memory.estimate.rank import distinct_stages, parameter_groups
from pretrain.model.description import ModelConfig


@dataclass(frozen=True)
class RankParameters:
    """Elements of the parameters on one rank before ZeRO divides them."""

    dense: float
    experts: float = 0.0
    tied: float = 0.0  # elements of `dense` that embedding and head share

    def after_zero(self, layout: Layout) -> float:
        """Elements that one rank owns after ZeRO divides them."""
        return self.dense / layout.zero_size + self.experts / layout.expert_zero_size


def rank_parameters(layout: Layout, model: ModelConfig | None, num_parameters: int) -> RankParameters:
    """Return the parameters of a rank of the largest pipeline stage. Without a model, all stages are assumed equal."""
    if model is None:
        return RankParameters(num_parameters / layout.pipeline_stages / layout.tensor_parallel_size)
    tied = model.vocab_size * model.hidden_size / layout.tensor_parallel_size if model.tie_word_embeddings else 0.0
    stages = []
    for stage in distinct_stages(model, layout):
        groups = parameter_groups(model, layout, stage)
        experts = sum(group.size for group in groups if group.is_expert)
        stages.append(RankParameters(sum(group.size for group in groups) - experts, experts, tied))
    return max(stages, key=lambda stage: stage.dense + stage.experts)


def step_traffic(layout: Layout, parameters: RankParameters, model: ModelConfig | None) -> list[Transfer]:
    """List all transfers of a rank in one step. Activations are included only if the model is known."""
    transfers = _zero_collectives(layout, parameters, model) + _offload(layout, parameters)
    if model is not None:
        transfers += _pipeline(layout, model) + block_transfers(layout, model) + _offloaded_activations(layout, model)
    return [transfer for transfer in transfers if transfer.bytes > 0]


def link_bytes(transfers: list[Transfer], link: str) -> float:
    """Bytes of one rank on a link in a step."""
    return sum(transfer.bytes for transfer in transfers if transfer.link == link)


def _reduced_element_bytes(layout: Layout) -> int:
    """Bytes of a gradient element in a collective.

    The dtype is the model's (DeepSpeedEngine.communication_data_type). With Ulysses it is fp32.
    """
    return 4 if layout.sequence_parallel_size > 1 else DTYPE_BYTES[layout.precision]


def _zero_collectives(layout: Layout, parameters: RankParameters, model: ModelConfig | None) -> list[Transfer]:
    """Collectives of gradients and parameters among the ranks that ZeRO divides over; experts use fewer ranks."""
    transfers = []
    for suffix, elements, ranks, stride in (
            ("", parameters.dense, layout.zero_size, layout.tensor_parallel_size),
            (" of experts", parameters.experts, layout.expert_zero_size, layout.expert_parallel_size)):
        if layout.zero_stage == 3:
            matrices = gathered_tensors(layout, model, experts=bool(suffix))
            transfers += _zero3_collectives(layout, parameters, suffix, elements, ranks, stride, matrices)
        else:
            transfers += _zero012_collectives(layout, suffix, elements, ranks, stride)
    return transfers


def _zero012_collectives(layout: Layout, suffix: str, elements: float, ranks: int, stride: int) -> list[Transfer]:
    """All-reduce of gradients, once a step or (ZeRO stage 2) once a micro-batch; then all-gather of updated parameters.

    At ZeRO stage 0 only bf16 has an all-gather, because its BF16_Optimizer divides the states among the ranks.
    """
    ring = (ranks - 1) / ranks
    reductions = layout.gradient_accumulation_steps if layout.zero_stage == 2 else 1
    overlaps = layout.overlap_comm and layout.zero_stage == 2
    buckets = math.ceil(elements / max(1, layout.reduce_bucket_size))
    transfers = [Transfer(f"gradients{suffix}: all-reduce", "network", "backward" if overlaps else "step",
                          2 * ring * elements * _reduced_element_bytes(layout) * reductions, ranks, stride, overlaps,
                          buckets * reductions)]
    if layout.zero_stage > 0 or layout.precision == "bf16":
        buckets = math.ceil(elements / max(1, layout.allgather_bucket_size))
        transfers.append(Transfer(f"parameters{suffix}: all-gather", "network", "step",
                                  ring * elements * layout.element_bytes, ranks, stride, messages=buckets))
    return transfers


def gathered_tensors(layout: Layout, model: ModelConfig | None, *, experts: bool = False) -> int:
    """Return the number of parameters that ZeRO stage 3 gathers; smaller ones remain on every rank.

    DeepSpeed gathers all parameters of a submodule together. A submodule has at most one large parameter.
    """
    if model is None:
        return 1
    return _larger_tensors(model, layout.param_persistence_threshold, experts)


@lru_cache(maxsize=64)
def _larger_tensors(model: ModelConfig, elements: int, experts: bool) -> int:
    return sum(each.size > elements and each.is_expert == experts
               for layer in model.layers() for each in layer.parameters)


def gathers_per_micro_batch(layout: Layout, parameters: RankParameters) -> tuple[float, float]:
    """Return how often ZeRO stage 3 gathers a parameter for (the forward, the backward pass), on average.

    The backward pass reuses the parameters that the forward pass used last (Layout.reused_parameters). With
    recomputation, the recomputed forward pass and the backward pass after it need only one gather together. A tied
    matrix is gathered for both of its layers, because too many parameters lie between these layers.
    """
    elements = parameters.dense + parameters.experts
    if elements <= layout.reused_parameters:
        return 1.0, 0.0
    gathers = 1.0 + parameters.tied / elements
    return gathers, gathers - layout.reused_parameters / elements


def _zero3_collectives(layout: Layout, parameters: RankParameters, suffix: str, elements: float, ranks: int,
                       stride: int, tensors: int) -> list[Transfer]:
    """All-gathers of parameters for both passes, and reduce-scatter of gradients after each backward pass.

    With ZeRO++'s hpZ the backward pass gathers within a group of `hpz_partition_size` ranks.
    """
    ring, steps = (ranks - 1) / ranks, layout.gradient_accumulation_steps
    forward, backward = gathers_per_micro_batch(layout, parameters)
    gathered = elements * layout.element_bytes * steps
    hpz_ranks = min(layout.hpz_partition_size, ranks)
    backward_ranks = hpz_ranks if hpz_ranks > 1 else ranks
    backward_ring = (backward_ranks - 1) / backward_ranks
    overlaps = layout.overlap_comm
    return [
        Transfer(f"parameters{suffix}: all-gather", "network", "forward", ring * gathered * forward, ranks, stride,
                 overlaps, tensors * steps * forward),
        Transfer(f"parameters{suffix}: all-gather", "network", "backward", backward_ring * gathered * backward,
                 backward_ranks, stride, overlaps, tensors * steps * backward),
        Transfer(f"gradients{suffix}: reduce-scatter", "network", "backward",
                 ring * elements * _reduced_element_bytes(layout) * steps, ranks, stride, overlaps,
                 math.ceil(elements / max(1, layout.reduce_bucket_size)) * steps)]


def _offload(layout: Layout, parameters: RankParameters) -> list[Transfer]:
    """Traffic of offloaded states that one rank owns: over PCIe, and to and from the disk."""
    owned = parameters.after_zero(layout)
    transfers = []
    if layout.offload_optimizer != "none":
        transfers += _offloaded_optimizer(layout, owned)
    if layout.offload_param != "none":
        transfers += _offloaded_parameters(layout, owned, gathers_per_micro_batch(layout, parameters))
    return transfers


def _offloaded_optimizer(layout: Layout, owned: float) -> list[Transfer]:
    """Gradients to the host, updated parameters back, and the optimizer states on NVMe.

    Gradients go to the host in every micro-batch. From the second micro-batch on, the sum first comes back to the
    device (async_accumulate_grad_in_cpu_via_gpu; stage3.py, partition_grads). The last sum goes to the host in fp32.
    """
    on_host = layout.offload_optimizer_ratio
    sums = layout.gradient_accumulation_steps - 1 if layout.zero_stage >= 2 else 0
    transfers = [Transfer("gradients to the host", "pcie", "backward",
                          on_host * owned * (4 + 2 * sums * layout.element_bytes), overlaps=layout.overlap_comm)]
    if layout.offload_param == "none":
        transfers.append(Transfer("updated parameters from the host", "pcie", "step",
                                  on_host * owned * layout.element_bytes))
    if layout.offload_optimizer == "nvme":
        element_bytes = 4 * (1 + layout.optimizer_moments + 1)  # master weight, optimizer states, gradient
        transfers.append(Transfer("optimizer states: read and written", "disk", "step", 2 * owned * element_bytes))
    return transfers


def _offloaded_parameters(layout: Layout, owned: float, gathers: tuple[float, float]) -> list[Transfer]:
    """Parameters that go to the device for every gather. With NVMe they are read from disk, and written after the step.

    Each rank keeps `offload_param.max_in_cpu` elements in host memory. These are not read or written.
    """
    size = owned * layout.element_bytes
    on_disk = max(0.0, 1 - layout.offload_param_max_in_cpu / owned) if layout.offload_param == "nvme" else 0.0
    transfers = []
    for phase, count in zip(("forward", "backward"), gathers, strict=True):
        read = size * layout.gradient_accumulation_steps * count
        transfers.append(Transfer("parameters from the host", "pcie", phase, read, overlaps=True))
        transfers.append(Transfer("parameters: read", "disk", phase, on_disk * read, overlaps=True))
    return [*transfers, Transfer("parameters: written", "disk", "step", on_disk * size)]


def _pipeline(layout: Layout, model: ModelConfig) -> list[Transfer]:
    """Activations and their gradients between pipeline stages, and the sum of a tied matrix's gradients."""
    stages = layout.pipeline_stages
    if stages == 1:
        return []
    size = hidden_bytes(layout, model) * layout.gradient_accumulation_steps
    stride = layout.world_size // stages
    messages = layout.gradient_accumulation_steps
    transfers = [
        Transfer("activations to the next pipeline stage", "network", "forward", size, 2, stride, messages=messages),
        Transfer("gradients to the previous pipeline stage", "network", "backward", size, 2, stride, messages=messages)]
    if model.tie_word_embeddings:
        tied = model.vocab_size * model.hidden_size * layout.grad_accum_bytes / layout.tensor_parallel_size
        transfers.append(Transfer("tied gradients: all-reduce", "network", "step", tied, 2, stride * (stages - 1)))
    return transfers


def _offloaded_activations(layout: Layout, model: ModelConfig) -> list[Transfer]:
    """Inputs of recomputed blocks or groups, to host memory and back (model/run_layers.py)."""
    recompute = layout.recomputation
    if not recompute.offload:
        return []
    groups = model.num_layers / layout.pipeline_stages / (recompute.interval or recompute.every)
    size = groups * hidden_bytes(layout, model) * layout.gradient_accumulation_steps
    return [Transfer("activations to the host", "pcie", "forward", size, overlaps=True),
            Transfer("activations from the host", "pcie", "backward", size, overlaps=True)]
