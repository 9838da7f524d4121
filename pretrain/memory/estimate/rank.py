"""One rank of a layout: its layers, micro-batch and parameters before ZeRO divides them, and its optimizer's tensors.

DeepSpeed 0.19.8 puts a wrapper around the optimizer. It owns the master weights and divides the states.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from pretrain.config.layout import Layout
from pretrain.model.description import Layer, ModelConfig, Parameter
from pretrain.model.operator_memory import FP32, MicroBatch
from pretrain.model.partition import layer_costs, stage_bounds

Allocation = tuple[tuple[str, str], int]  # ((role, location), bytes)


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """An optimizer parameter group: the parameters that ZeRO flattens and divides together."""

    sizes: tuple[int, ...]  # elements of each parameter on this rank before ZeRO, in the order of registration
    ranks: int  # number of ranks over which ZeRO divides the parameters
    is_expert: bool = False
    muon_size: int = 0  # elements that Muon orthogonalises: all matrices except embeddings and head

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Running sum of `sizes`: elements of the first i + 1 parameters."""
        return tuple(accumulate(self.sizes))

    @property
    def size(self) -> int:
        """Elements of all parameters."""
        return self.ends[-1]

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(self.sizes)

    @cached_property
    def counts(self) -> Counter[int]:
        """Number of parameters of each size."""
        return Counter(self.sizes)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Elements of each parameter that one rank holds at ZeRO-3 (zero/partition_parameters.py, _aligned_size)."""
        return tuple(-(-size // self.ranks) for size in self.sizes)


def pipeline_stage_layers(model: ModelConfig, layout: Layout, pipeline_stage: int) -> tuple[Layer, ...]:
    """Return the layers of one pipeline stage. Raises ConfigError, as partition.stage_bounds does."""
    bounds = pipeline_stage_bounds(model, layout)
    return model.layers()[bounds[pipeline_stage]:bounds[pipeline_stage + 1]]


def pipeline_stage_bounds(model: ModelConfig, layout: Layout) -> list[int]:
    """Return indices into `model.layers()`: pipeline stage i holds the layers bounds[i] to bounds[i + 1] - 1."""
    return _bounds(model, layout.pipeline_stages, layout.partition_method, layout.seq_length, layout.layer_times)


@lru_cache(maxsize=256)
def _bounds(model: ModelConfig, pipeline_stages: int, partition_method: str, seq_length: int,
            layer_times: tuple[int, ...]) -> list[int]:
    return stage_bounds(layer_costs(model, seq_length), num_stages=pipeline_stages, method=partition_method,
                        times=layer_times)


def distinct_stages(model: ModelConfig, layout: Layout) -> list[int]:
    """Return the first of all pipeline stages with the same layers, apart from the first and the last stage.

    Ranks of equal stages need the same time for a micro-batch. They differ in the micro-batches in flight only: the
    first of them has the most, and needs the most memory.
    """
    stages, every = layout.pipeline_stages, layout.recomputation.every
    if stages == 1:
        return [0]
    bounds = pipeline_stage_bounds(model, layout)
    layers, found = model.layers(), dict[object, int]()
    for stage in range(stages):
        own = layers[bounds[stage]:bounds[stage + 1]]
        first_block = sum(layer.kind == "block" for layer in layers[:bounds[stage]]) % every if every > 1 else 0
        found.setdefault((stage == 0, stage == stages - 1, own, first_block), stage)
    return list(found.values())


def parameters_of(layers: tuple[Layer, ...]) -> tuple[Parameter, ...]:
    """Return the parameters of some layers; a matrix that two of them share occurs once."""
    tied = False
    parameters: list[Parameter] = []
    for layer in layers:
        if not (layer.tied and tied):
            parameters += layer.parameters
        tied = tied or layer.tied
    return tuple(parameters)


def local_size(parameter: Parameter, layout: Layout) -> int:
    """Return a parameter's elements on one rank after tensor and expert parallelism, before ZeRO divides it."""
    return _divided_size(parameter, layout.tensor_parallel_size, layout.expert_parallel_size)


def _divided_size(parameter: Parameter, tensor_parallel_size: int, expert_parallel_size: int) -> int:
    ranks = tensor_parallel_size if parameter.split_dim is not None else 1
    ranks *= expert_parallel_size if parameter.is_expert else 1
    return -(-parameter.size // ranks)


def parameter_groups(model: ModelConfig, layout: Layout, pipeline_stage: int) -> tuple[ParameterGroup, ...]:
    """Return the non-empty parameter groups of one rank.

    Matrices and vectors are two groups, because only matrices have weight decay (engine/optimizer.py). Under expert
    parallelism, experts have groups of their own, because DeepSpeed divides them over fewer ranks.
    """
    return _groups(pipeline_stage_layers(model, layout, pipeline_stage), layout.tensor_parallel_size,
                   layout.expert_parallel_size, layout.zero_size, layout.expert_zero_size)


@lru_cache(maxsize=256)
def _groups(layers: tuple[Layer, ...], tensor_parallel_size: int, expert_parallel_size: int,
            zero_size: int, expert_zero_size: int) -> tuple[ParameterGroup, ...]:
    found: dict[tuple[bool, bool], list[tuple[int, bool]]] = {}
    for parameter in parameters_of(layers):
        size = _divided_size(parameter, tensor_parallel_size, expert_parallel_size)
        uses_adam = "embed" in parameter.name or "lm_head" in parameter.name  # DeepSpeed's Muon selects by name
        is_divided = parameter.is_expert and expert_parallel_size > 1
        found.setdefault((not parameter.is_matrix, is_divided), []).append((size, uses_adam))
    return tuple(
        ParameterGroup(sizes=tuple(size for size, _ in rows),
                       ranks=max(1, expert_zero_size if expert else zero_size), is_expert=expert,
                       muon_size=0 if vectors else sum(size for size, uses_adam in rows if not uses_adam))
        for (vectors, expert), rows in sorted(found.items()))


@dataclass(frozen=True)
class Rank:
    """One rank of a layout."""

    model: ModelConfig
    layout: Layout
    pipeline_stage: int = 0
    zero_rank: int = 0  # index of this rank among the ranks that ZeRO divides over

    @cached_property
    def micro_batch(self) -> MicroBatch:
        layout = self.layout
        tokens = -(-layout.micro_batch_size * layout.seq_length // layout.sequence_parallel_size)
        return MicroBatch(tokens, layout.seq_length, layout.element_bytes, cuda=layout.device_kind == "cuda",
                          tensor_parallel_size=layout.tensor_parallel_size, documents=layout.document_attention,
                          fp16=layout.precision == "fp16", mlp_tiles=layout.mlp_tiles,
                          model_extensions=layout.model_extensions,
                          sequence_parallel_size=layout.sequence_parallel_size, keeps_norms=layout.zero_stage == 3,
                          plain=layout.plain_operators, compiled=layout.compile_blocks)

    @property
    def is_last_stage(self) -> bool:
        """Return whether the rank is on the last pipeline stage, which computes the loss."""
        return self.pipeline_stage == self.layout.pipeline_stages - 1

    @property
    def in_flight(self) -> int:
        """Largest number of micro-batches that wait for their backward pass (1F1B, runtime/pipe/schedule.py)."""
        return min(self.layout.pipeline_stages - self.pipeline_stage, self.layout.gradient_accumulation_steps)

    @property
    def pipe_buffers(self) -> int:
        """Slots for inputs and outputs of micro-batches (runtime/pipe/schedule.py, TrainSchedule.num_pipe_buffers)."""
        return max(2, self.in_flight)

    @property
    def accumulates(self) -> bool:
        """Return whether a step sums the gradients of several micro-batches."""
        return self.layout.gradient_accumulation_steps > 1

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return pipeline_stage_layers(self.model, self.layout, self.pipeline_stage)

    @cached_property
    def groups(self) -> tuple[ParameterGroup, ...]:
        return parameter_groups(self.model, self.layout, self.pipeline_stage)


def optimizer_wrapper(layout: Layout) -> str:
    """Name the wrapper that DeepSpeed chooses (runtime/engine.py, _do_optimizer_sanity_check).

    "zero3" (DeepSpeedZeroOptimizer_Stage3), "zero12" (DeepSpeedZeroOptimizer), "bf16" (BF16_Optimizer), "fp16"
    (FP16_Optimizer) or "none" (fp32 at ZeRO stage 0). In this project ZeRO stages 0 and 1 run as a PipelineModule; for
    it DeepSpeed chooses BF16_Optimizer in bf16 at stage 0.
    """
    if layout.zero_stage == 3:
        return "zero3"
    if layout.uses_bf16_optimizer:
        return "bf16"
    if layout.zero_stage > 0:
        return "zero12"
    return "fp16" if layout.precision == "fp16" else "none"


def reduces_gradients(layout: Layout) -> bool:
    """Return whether ZeRO stages 1 and 2 copy gradients to reduce them; see patches/zero.py."""
    in_place = layout.zero_size == 1 and layout.contiguous_gradients and layout.offload_optimizer == "none"
    return not in_place or layout.grad_accum_bytes != layout.element_bytes


def optimizer_location(layout: Layout) -> str:
    """Return the location of an offloaded optimizer's tensors that DeepSpeed pins if `pin_memory` is true."""
    if layout.offload_optimizer == "none":
        return "device"
    return "pinned" if layout.offload_optimizer_pinned else "host"


def unpinned_location(layout: Layout) -> str:
    """Return the location of an offloaded optimizer's tensors that DeepSpeed never pins.

    These are the optimizer states and ZeRO-3's master weights, which are converted to fp32 after pinning.
    """
    return "device" if layout.offload_optimizer == "none" else "host"


def master_weight_bytes(layout: Layout) -> int:
    """Bytes of one element of the master weights, and of the gradient that the optimizer is given."""
    return layout.element_bytes if layout.masters_in_16bit else FP32


def optimizer_state_bytes(layout: Layout) -> int:
    """Bytes of the optimizer states of one element, for every optimizer except Muon.

    DeepSpeed's Lion on the CPU allocates two tensors, as Adam does (ops/lion/cpu_lion.py).
    """
    tensors = layout.optimizer_moments
    if layout.optimizer == "lion" and layout.offload_optimizer != "none":
        tensors += 1
    return tensors * (2 if layout.moments_in_16bit else FP32)


def eight_bit_state_bytes(elements: int) -> int:
    """Bytes of both states of one tensor of bitsandbytes' AdamW8bit (optim/optimizer.py, Optimizer2State.init_state).

    Each state has a byte for each element, and an fp32 maximum for each block of 256 elements. Tensors of less than
    4,096 elements have fp32 states. The two tables of 256 values that all tensors share are not counted.
    """
    if elements < 4096:
        return 2 * FP32 * elements
    return 2 * (elements + FP32 * -(-elements // 256))


def optimizer_states(group: ParameterGroup, elements: int, layout: Layout) -> Iterator[Allocation]:
    """Yield the optimizer states of `elements` elements of a group.

    Muon updates hidden matrices. It keeps one momentum tensor in the gradients' dtype, and a second one until the step
    is known to have no overflow (`_muon_pending_momentum`). An offloaded momentum is fp32, and the only one.
    Embeddings, head and vectors use Adam.
    """
    location = unpinned_location(layout)
    if layout.optimizer == "adamw8bit":
        yield ("optimizer_states", location), eight_bit_state_bytes(elements)
        return
    if layout.optimizer != "muon":
        yield ("optimizer_states", location), elements * optimizer_state_bytes(layout)
        return
    muon_elements = round(elements * group.muon_size / group.size)
    momentum = muon_elements * (layout.grad_accum_bytes if layout.offload_optimizer == "none" else FP32)
    yield ("optimizer_states", location), momentum + (elements - muon_elements) * 2 * FP32
    if layout.zero_stage < 3 and layout.offload_optimizer == "none":
        yield ("buffers", "device"), momentum
