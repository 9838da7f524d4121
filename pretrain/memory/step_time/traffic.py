"""What one rank moves in a step, over the network of the ranks, over PCIe, and to and from the local disk.

Counted as DeepSpeed 0.19.8 does it, which at stages 1 and 2 is more than the ZeRO paper says: gradients are reduced
by all-reduce, of which each rank keeps its part (runtime/zero/stage_1_and_2.py, allreduce_and_scatter). Latencies,
norms and losses are left out.
"""

from dataclasses import dataclass

from pretrain.config.layout import DTYPE_BYTES, Layout
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.pipeline_stages import local_size, pipeline_stage_tensors

LINKS = ("network", "pcie", "disk")
PHASES = ("forward", "backward", "step")  # "step": once, after the last micro-batch


@dataclass(frozen=True)
class Transfer:
    """One kind of bytes. Of a collective: what a ring makes one rank send, and receive, in a whole step."""

    what: str
    link: str  # network, pcie, disk
    phase: str  # forward, backward, step
    bytes: float
    ranks: int = 1  # that take part
    stride: int = 1  # between their numbers
    overlaps: bool = False  # with the computation of its phase


@dataclass(frozen=True)
class RankParameters:
    """Elements of one rank's share of the model before ZeRO divides them."""

    dense: float
    experts: float = 0.0
    tied: float = 0.0  # of `dense`: the matrix that embedding and head share

    def owned(self, layout: Layout) -> float:
        """Of them, what ZeRO gives to one rank."""
        return self.dense / layout.zero_size + self.experts * layout.expert_parallel_size / layout.zero_size


def rank_parameters(layout: Layout, shape: ModelShape | None, num_parameters: int) -> RankParameters:
    """Of a rank of the largest stage."""
    if shape is None:
        return RankParameters(num_parameters / layout.pipeline_stages / layout.tensor_parallel_size)
    tied = shape.vocab_size * shape.hidden_size / layout.tensor_parallel_size if shape.tie_word_embeddings else 0.0
    parts = []
    for stage in range(layout.pipeline_stages):
        sizes = [(tensor.expert, local_size(tensor, layout)) for tensor in pipeline_stage_tensors(shape, layout, stage)]
        parts.append(RankParameters(sum(size for expert, size in sizes if not expert),
                          sum(size for expert, size in sizes if expert), tied))
    return max(parts, key=lambda part: part.dense + part.experts)


def step_traffic(layout: Layout, part: RankParameters, shape: ModelShape | None) -> list[Transfer]:
    """All transfers of one step of a rank with `part` of the model; activations only where the shape is known."""
    rows = _zero_network(layout, part) + _offload(layout, part)
    if shape is not None:
        rows += _pipeline(layout, shape) + _shared_layers(layout, shape)
    return [row for row in rows if row.bytes > 0]


def link_bytes(rows: list[Transfer], link: str) -> float:
    """Of a rank and a step."""
    return sum(row.bytes for row in rows if row.link == link)


def reduced_dtype_bytes(layout: Layout) -> int:
    """Of a gradient on its way: DeepSpeedEngine.communication_data_type is the model's; Ulysses reduces in fp32."""
    return 4 if layout.sequence_parallel_size > 1 else DTYPE_BYTES[layout.precision]


def passes(layout: Layout) -> float:
    """Forward passes of a block per micro-batch: recomputation is another one."""
    return 2.0 if layout.activation_checkpoint_interval else 1.0


def _zero_network(layout: Layout, part: RankParameters) -> list[Transfer]:
    """Gradients and parameters within the ranks that ZeRO divides over; experts have a smaller such group."""
    expert_ranks = layout.zero_size // layout.expert_parallel_size
    rows = []
    for what, elements, ranks, stride in (
            ("", part.dense, layout.zero_size, layout.tensor_parallel_size),
            (" of experts", part.experts, expert_ranks,
             layout.tensor_parallel_size * layout.expert_parallel_size)):
        rows += _stage_3(layout, part, what, elements, ranks, stride) if layout.zero_stage == 3 else \
            _stages_0_to_2(layout, what, elements, ranks, stride)
    return rows


def _stages_0_to_2(layout: Layout, what: str, elements: float, ranks: int, stride: int) -> list[Transfer]:
    """All-reduce at the end of the step, at stage 2 of each micro-batch; then the all-gather of updated parameters.

    Stage 0 has parts, and so an all-gather, only in bf16, where DeepSpeed takes its BF16_Optimizer.
    """
    ring = (ranks - 1) / ranks
    times = layout.gradient_accumulation_steps if layout.zero_stage == 2 else 1
    overlaps = layout.overlap_comm and layout.zero_stage == 2
    rows = [Transfer(f"gradients{what}: all-reduce", "network", "backward" if overlaps else "step",
                     2 * ring * elements * reduced_dtype_bytes(layout) * times, ranks, stride, overlaps)]
    if layout.zero_stage > 0 or layout.precision == "bf16":
        rows.append(Transfer(f"parameters{what}: all-gather", "network", "step",
                             ring * elements * layout.element_bytes, ranks, stride))
    return rows


def gathers(layout: Layout, part: RankParameters) -> tuple[float, float]:
    """How often stage 3 fetches a parameter for a micro-batch's forward and for its backward, on average.

    The backward finds those that were used last still there (Layout.reused_parameters). A recomputed forward fetches
    for the backward that follows it at once. A tied matrix is fetched by both its layers, too far apart to keep it.
    """
    elements = part.dense + part.experts
    if elements <= layout.reused_parameters:
        return 1.0, 0.0
    fetched = 1.0 + part.tied / elements
    return fetched, fetched - layout.reused_parameters / elements


def _stage_3(layout: Layout, part: RankParameters, what: str, elements: float, ranks: int,
             stride: int) -> list[Transfer]:
    """Parameters gathered for the passes over them, gradients scattered after each backward.

    With ZeRO++'s hpZ the backward gathers within a group of `hpz_partition_size` ranks.
    """
    ring, steps = (ranks - 1) / ranks, layout.gradient_accumulation_steps
    forward, backward = gathers(layout, part)
    whole = elements * layout.element_bytes * steps
    near = min(layout.hpz_partition_size, ranks)
    back_ranks = near if near > 1 else ranks
    overlap = layout.overlap_comm
    return [
        Transfer(f"parameters{what}: all-gather", "network", "forward", ring * whole * forward, ranks, stride, overlap),
        Transfer(f"parameters{what}: all-gather", "network", "backward",
                 (back_ranks - 1) / back_ranks * whole * backward, back_ranks, stride, overlap),
        Transfer(f"gradients{what}: reduce-scatter", "network", "backward",
                 ring * elements * reduced_dtype_bytes(layout) * steps, ranks, stride, overlap)]


def _offload(layout: Layout, part: RankParameters) -> list[Transfer]:
    """What crosses PCIe, and what the disk reads and writes, of a rank's part of the states.

    Gradients go to the host at each micro-batch and, from the second on, come back first to be added to
    (async_accumulate_grad_in_cpu_via_gpu; stage3.py, partition_grads); the last time they go in fp32. Of parameters on
    NVMe each rank keeps offload_param.max_in_cpu elements in host memory.
    """
    mine = part.owned(layout)
    rows = []
    if layout.offload_optimizer != "none":
        ratio = layout.offload_optimizer_ratio
        more = layout.gradient_accumulation_steps - 1 if layout.zero_stage >= 2 else 0
        rows.append(Transfer("gradients to the host", "pcie", "backward",
                             ratio * mine * (4 + 2 * more * layout.element_bytes), overlaps=layout.overlap_comm))
        if layout.offload_param == "none":
            rows.append(Transfer("updated parameters from the host", "pcie", "step",
                                 ratio * mine * layout.element_bytes))
    if layout.offload_optimizer == "nvme":
        state = 4 * (1 + layout.optimizer_moments + 1)  # master, moments, gradient
        rows.append(Transfer("optimizer states: read and written", "disk", "step", 2 * mine * state))
    if layout.offload_param != "none":
        reads = mine * layout.element_bytes * layout.gradient_accumulation_steps
        on_disk = max(0.0, 1 - layout.offload_param_max_in_cpu / mine) if layout.offload_param == "nvme" else 0.0
        for phase, times in zip(("forward", "backward"), gathers(layout, part), strict=True):
            rows.append(Transfer("parameters from the host", "pcie", phase, reads * times, overlaps=True))
            rows.append(Transfer("parameters: read", "disk", phase, on_disk * reads * times, overlaps=True))
        rows.append(Transfer("parameters: written", "disk", "step", on_disk * mine * layout.element_bytes))
    return rows


def _hidden_bytes(layout: Layout, shape: ModelShape) -> float:
    """Of one micro-batch between two blocks, on one rank."""
    tokens = layout.micro_batch_size * layout.seq_length / layout.sequence_parallel_size
    return tokens * shape.hidden_size * layout.element_bytes


def _pipeline(layout: Layout, shape: ModelShape) -> list[Transfer]:
    """Activations to the next stage and their gradients to the one before; tied embeddings summed over the stages."""
    stages = layout.pipeline_stages
    if stages == 1:
        return []
    size = _hidden_bytes(layout, shape) * layout.gradient_accumulation_steps
    stride = layout.world_size // stages
    rows = [Transfer("activations to the next stage", "network", "forward", size, 2, stride),
            Transfer("gradients to the stage before", "network", "backward", size, 2, stride)]
    if shape.tie_word_embeddings:
        tied = shape.vocab_size * shape.hidden_size * layout.grad_accum_bytes / layout.tensor_parallel_size
        rows.append(Transfer("tied gradients: all-reduce", "network", "step", tied, 2, stride * (stages - 1)))
    return rows


def _shared_layers(layout: Layout, shape: ModelShape) -> list[Transfer]:
    """Inside the blocks: tensor parallelism's two all-reduces a pass (Megatron-LM, arXiv 1909.08053), Ulysses' four
    all-to-alls (arXiv 2309.14509), and two all-to-alls of every expert layer (DeepSpeed-MoE, arXiv 2201.05596).
    """
    blocks = shape.num_layers / layout.pipeline_stages
    hidden = _hidden_bytes(layout, shape) * layout.gradient_accumulation_steps
    rows = []
    for phase, times in (("forward", 1.0), ("backward", passes(layout))):
        for what, ranks, stride, size in (
                ("tensor-parallel all-reduce", layout.tensor_parallel_size, 1, 2 * 2 * blocks * hidden),
                ("sequence-parallel all-to-all", layout.sequence_parallel_size, layout.tensor_parallel_size,
                 4 * blocks * hidden),
                ("expert all-to-all", layout.expert_parallel_size, layout.tensor_parallel_size,
                 2 * shape.num_moe_layers() / layout.pipeline_stages * hidden * shape.experts_per_token)):
            rows.append(Transfer(what, "network", phase, size * times * (ranks - 1) / ranks, ranks, stride))
    return rows
