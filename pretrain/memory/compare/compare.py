"""Compare candidates: memory, step time, whether they fit the hardware, whether train.py accepts the JSON, cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.config.plan import Plan
from pretrain.errors import counted
from pretrain.memory.compare.candidates import Candidate, group_micro_batches
from pretrain.memory.estimate.deepspeed_formulas import DeepSpeedEstimate, deepspeed_estimate
from pretrain.memory.estimate.estimate_memory import MemoryEstimate, estimate_memory
from pretrain.memory.footprint import GB, with_unit
from pretrain.memory.hardware import Cluster, make_cluster
from pretrain.memory.step_time.block_traffic import Transfer
from pretrain.memory.step_time.calibrate import Calibration
from pretrain.memory.step_time.kernel_time import with_predicted_times
from pretrain.memory.step_time.time_model import StepTime, estimate_step_time
from pretrain.memory.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters, model_error
from pretrain.memory.step_time.traffic import rank_parameters, step_traffic
from pretrain.model.description import ModelConfig

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv 2203.15556, table 3
STORAGE_RATE = 2e9  # bytes a second that one node writes to the checkpoints' storage: an assumption
_NEARLY_FASTEST = 1.02  # multiple of the fastest step time: see best_micro_batch
# ZeRO stages from the simplest one. 0 comes after 1: in bf16 DeepSpeed divides the optimizer states at stage 0 as well,
# and in other precisions stage 1 needs less memory for the same traffic.
_SIMPLEST_STAGES = (1, 0, 2, 3)


@dataclass(frozen=True)
class Workload:
    """A model and the cluster that it is to be trained on."""

    cluster: Cluster
    num_parameters: int
    model: ModelConfig | None = None  # None: only the number of parameters is known
    name: str = ""
    time_parameters: TimeParameters = DEFAULT_PARAMETERS
    calibration: Calibration | None = None


@dataclass(frozen=True)
class ComparisonRow:
    """One candidate and all its estimates."""

    candidate: Candidate
    estimate: MemoryEstimate
    traffic: list[Transfer]
    time: StepTime | None  # None: only model states are known
    shortage: str  # memory that is too small, and by how much; "": the candidate fits
    deepspeed: DeepSpeedEstimate | None

    @property
    def fits(self) -> bool:
        return not self.shortage

    @property
    def recommendable(self) -> bool:
        """Return whether the candidate fits and train.py accepts its JSON."""
        return self.fits and not self.candidate.rejection


def estimate_candidate(candidate: Candidate, workload: Workload,
                       memory: MemoryEstimate | None = None) -> ComparisonRow:
    """Estimate one candidate. Raises ConfigError for an impossible layout.

    Args:
        memory: of the candidate, if it is already estimated.
    """
    layout, model, cluster = candidate.layout, workload.model, workload.cluster
    memory = memory or estimate_memory(model, layout, num_parameters=workload.num_parameters)
    parameters = rank_parameters(layout, model, workload.num_parameters)
    traffic = step_traffic(layout, parameters, model)
    time = None
    if model is not None:
        time = estimate_step_time(layout, cluster, model, traffic, parameters, workload.time_parameters)
    deepspeed = deepspeed_estimate(layout, num_parameters=workload.num_parameters, model=model, nodes=cluster.nodes,
                                   gpus_per_node=cluster.gpus_per_node)
    return ComparisonRow(candidate, memory, traffic, time, memory_shortage(memory, cluster), deepspeed)


def predict(plan: Plan, gpu: str) -> ComparisonRow:
    """Estimate memory and step time of a plan on GPUs of a kind. Raises ConfigError."""
    cluster = make_cluster(gpu=gpu, world_size=plan.layout.world_size, nodes=None, gpus_per_node=None)
    return estimate_candidate(Candidate(plan.ds_config, with_predicted_times(plan.layout, plan.model, cluster)),
                              Workload(cluster, plan.model.num_parameters(), plan.model))


def compare(candidates: Sequence[Candidate], workload: Workload, *,
            all_micro_batches: bool = False) -> list[ComparisonRow]:
    """Estimate all candidates. Of candidates that differ only in the micro-batch size, return only the best."""
    if all_micro_batches:
        return [estimate_candidate(candidate, workload) for candidate in candidates]
    return [best_micro_batch(_until_too_large(group, workload)) for group in group_micro_batches(candidates)]


def _until_too_large(candidates: list[Candidate], workload: Workload) -> list[ComparisonRow]:
    """Estimate candidates in the order of their micro-batch sizes, before the first that does not fit.

    The smallest micro-batch is always estimated.
    """
    rows: list[ComparisonRow] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.layout.micro_batch_size):
        memory = estimate_memory(workload.model, candidate.layout, num_parameters=workload.num_parameters)
        fits = not memory_shortage(memory, workload.cluster)
        if fits or not rows:
            rows.append(estimate_candidate(candidate, workload, memory))
        if not fits:
            break
    return rows


def best_micro_batch(rows: list[ComparisonRow]) -> ComparisonRow:
    """Return the largest micro-batch among the nearly fastest that fit, or the smallest one if none fits."""
    fitting = [row for row in rows if row.fits and row.time is not None]
    if not fitting:
        return min(rows, key=lambda row: row.candidate.layout.micro_batch_size)
    fastest = min(row.time.total_seconds for row in fitting if row.time)
    near = [row for row in fitting if row.time and row.time.total_seconds <= _NEARLY_FASTEST * fastest]
    return max(near, key=lambda row: row.candidate.layout.micro_batch_size)


def complexity(layout: Layout) -> int:
    """Return how many steps a layout is away from the simplest one: ZeRO-1 without anything else.

    Each ZeRO stage, each doubling of a parallel degree, each destination of an offload and recomputation count as one.
    Tensor and sequence parallelism count as two more, and thus at least as ZeRO-3: they depend on the model's heads and
    the sequence length, and they communicate in every layer, where ZeRO alone changes nothing but the JSON's stage.
    """
    degrees = (layout.pipeline_stages, layout.tensor_parallel_size, layout.sequence_parallel_size,
               layout.expert_parallel_size)
    divides_layers = layout.tensor_parallel_size * layout.sequence_parallel_size > 1
    places = ("none", "cpu", "nvme")
    return (_SIMPLEST_STAGES.index(layout.zero_stage) + sum(math.ceil(math.log2(degree)) for degree in degrees)
            + (2 if divides_layers else 0) + places.index(layout.offload_optimizer) + places.index(layout.offload_param)
            + int(layout.recomputation.is_on) + int(layout.recomputation.offload))


def step_seconds(row: ComparisonRow) -> float:
    return row.time.total_seconds if row.time else 0.0


def recommend(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the simplest of the fastest rows among those that fit and that train.py accepts, or None.

    The fastest rows are those whose step time equals the shortest one within the larger error of both predictions.
    """
    accepted = [row for row in rows if row.recommendable]
    if not accepted:
        return None
    fastest = min(accepted, key=step_seconds)
    equal = [row for row in accepted if step_seconds(row) <= step_seconds(fastest) *
             (1 + max(model_error(each.candidate.layout) for each in (row, fastest)))]
    return min(equal, key=lambda row: (complexity(row.candidate.layout), step_seconds(row), row.estimate.device_bytes))


def memory_shortage(estimate: MemoryEstimate, cluster: Cluster) -> str:
    """Return which memory is too small and by how much, or "" if the estimate fits with the margin."""
    ranks_per_node = min(cluster.gpus_per_node, cluster.world_size)
    needs = (
        ("the device", estimate.device_bytes, cluster.device_budget_bytes),
        ("a node's host memory", estimate.host_bytes * ranks_per_node, cluster.host_budget_bytes),
        ("a node's NVMe", estimate.nvme_bytes * ranks_per_node, cluster.nvme_bytes),
    )
    for memory, needed, available in needs:
        if needed > available:
            return f"{memory}: {with_unit(needed)} of {with_unit(available)}"
    return ""


@dataclass(frozen=True)
class Cost:
    """Cost of a run. The field names are keys of `ds-pretrain compare --json`."""

    tokens: float
    chinchilla_tokens: float
    flops: float  # model FLOPs, without recomputation
    mfu: float
    days: float
    gpu_hours: float
    checkpoint_bytes: int
    checkpoint_seconds: float


def run_cost(layout: Layout, *, num_parameters: int, flops_per_token: float, peak_flops: float, mfu: float,
             nodes: int, tokens: float | None = None, storage_rate: float = STORAGE_RATE) -> Cost:
    """Estimate the cost of a run at a given MFU.

    Args:
        num_parameters: of the model, with all experts.
        peak_flops: of all devices, per second.
        tokens: of the run. None: 20 per parameter (Chinchilla).
        storage_rate: bytes a second that each node writes; all nodes write at the same time.
    """
    optimal = float(CHINCHILLA_TOKENS_PER_PARAMETER * num_parameters)
    tokens = optimal if tokens is None else tokens
    seconds = tokens * flops_per_token / (peak_flops * mfu)
    size = layout.checkpoint_bytes(num_parameters)
    return Cost(tokens=tokens, chinchilla_tokens=optimal, flops=tokens * flops_per_token, mfu=mfu,
                days=seconds / 86400, gpu_hours=seconds / 3600 * layout.world_size, checkpoint_bytes=size,
                checkpoint_seconds=size / nodes / storage_rate)


def cost_lines(cost: Cost, nodes: int, storage_rate: float = STORAGE_RATE) -> list[str]:
    """Describe a cost in two sentences."""
    rule = "Chinchilla's 20 a parameter" if cost.tokens == cost.chinchilla_tokens else \
        f"Chinchilla's 20 a parameter would be {tokens_text(cost.chinchilla_tokens)}"
    return [f"{tokens_text(cost.tokens)} tokens ({rule}) are {cost.flops:.3g} FLOPs; at an MFU of {cost.mfu:.1%}: "
            f"{_scaled(cost.days * 86400, _TIMES)}, {_number(cost.gpu_hours)} GPU-hours",
            f"a checkpoint has {_scaled(cost.checkpoint_bytes, _SIZES)} and takes {_number(cost.checkpoint_seconds)} s "
            f"at {storage_rate / GB:g} GB/s a node, {counted(nodes, 'node')}"]


_TIMES = (("days", 2 * 86400.0, 86400.0), ("hours", 7200.0, 3600.0), ("minutes", 120.0, 60.0), ("s", 0.0, 1.0))
_SIZES = (("TB", 1e12, 1e12), ("GB", 1e9, 1e9), ("MB", 0.0, 1e6))


def _scaled(number: float, units: tuple[tuple[str, float, float], ...]) -> str:
    """Format a number in the first unit whose smallest value it reaches. A unit: (name, smallest value, size)."""
    name, size = next((name, size) for name, smallest, size in units if number >= smallest)
    return f"{_number(number / size)} {name}"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def tokens_text(number: float) -> str:
    """Format a number of tokens or parameters: 26 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:,.4g} {unit}"
    return f"{number:,.0f}"
