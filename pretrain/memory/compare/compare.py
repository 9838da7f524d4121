"""Compare candidates: memory, whether they fit the hardware, whether train.py accepts the JSON, estimates of a step.

Extensions predict a step (`Extension.estimates`). Without them, the candidates are compared by their memory alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.active_extensions import functions
from pretrain.config.layout import Layout
from pretrain.extension import StepEstimates
from pretrain.memory.compare.candidates import Candidate, group_micro_batches
from pretrain.memory.estimate.estimate_memory import MemoryEstimate, estimate_memory
from pretrain.memory.footprint import in_unit, with_unit
from pretrain.memory.hardware import Cluster
from pretrain.model.description import ModelConfig

_NEARLY_FASTEST = 1.02  # multiple of the fastest step time: see best_micro_batch
# ZeRO stages from the simplest one. 0 comes after 1: in bf16 DeepSpeed divides the optimizer states at stage 0 as well,
# and in other precisions stage 1 needs less memory for the same traffic.
_SIMPLEST_STAGES = (1, 0, 2, 3)


def step_estimates(cluster: Cluster | None, measured: Sequence[str] = ()) -> StepEstimates | None:
    """Return what predicts a training step on a cluster, or as in measured runs; None if no extension does.

    Raises ConfigError for run folders that cannot be used.
    """
    return next((estimates(cluster, measured=measured) for _, estimates in functions("estimates")), None)


@dataclass(frozen=True)
class Workload:
    """A model and the cluster that it is to be trained on."""

    cluster: Cluster
    num_parameters: int
    model: ModelConfig | None = None  # None: only the number of parameters is known
    name: str = ""
    estimates: StepEstimates | None = None  # None: nothing predicts a step

    @classmethod
    def of(cls, model: ModelConfig, cluster: Cluster, name: str = "") -> "Workload":
        """Return the workload with the estimates of extensions."""
        return cls(cluster, model.num_parameters(), model, name, step_estimates(cluster))


@dataclass(frozen=True)
class ComparisonRow:
    """One candidate and its estimates."""

    candidate: Candidate
    estimate: MemoryEstimate
    shortage: str  # memory that is too small, and by how much; "": the candidate fits
    step: Mapping[str, Any]  # see Extension.estimates; {}: nothing predicts a step

    @property
    def fits(self) -> bool:
        return not self.shortage

    @property
    def recommendable(self) -> bool:
        """Return whether the candidate fits and train.py accepts its JSON."""
        return self.fits and not self.candidate.rejection

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step; 0 if nothing predicts it: then layouts are ordered by complexity and memory."""
        return float(self.step.get("step_seconds", 0.0))

    def describe(self, cluster: Cluster, unit: str) -> str:
        """Describe the layout, its batch and its memory in one line."""
        layout = self.candidate.layout
        return f"{self.candidate.name}, micro-batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps} " \
               f"accumulation: {in_unit(self.estimate.device_bytes, unit)} of " \
               f"{in_unit(cluster.gpu.memory_bytes, unit)} {unit}"


def estimate_candidate(candidate: Candidate, workload: Workload,
                       memory: MemoryEstimate | None = None) -> ComparisonRow:
    """Estimate one candidate. Raises ConfigError for an impossible layout.

    Args:
        memory: of the candidate, if it is already estimated.
    """
    layout, model = candidate.layout, workload.model
    memory = memory or estimate_memory(model, layout, num_parameters=workload.num_parameters)
    step = {} if model is None or workload.estimates is None else workload.estimates(layout, model)
    return ComparisonRow(candidate, memory, memory_shortage(memory, workload.cluster), step)


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
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return min(rows, key=lambda row: row.candidate.layout.micro_batch_size)
    fastest = min(row.step_seconds for row in fitting)
    near = [row for row in fitting if row.step_seconds <= _NEARLY_FASTEST * fastest]
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


def recommend(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the simplest of the fastest rows among those that fit and that train.py accepts, or None.

    The fastest rows are those whose step time equals the shortest one within the larger error of both predictions.
    """
    accepted = [row for row in rows if row.recommendable]
    if not accepted:
        return None
    fastest = min(accepted, key=lambda row: row.step_seconds)
    equal = [row for row in accepted if row.step_seconds <= fastest.step_seconds *
             (1 + max(each.step.get("relative_error", 0.0) for each in (row, fastest)))]
    return min(equal, key=lambda row: (complexity(row.candidate.layout), row.step_seconds, row.estimate.device_bytes))


def display_order(rows: list[ComparisonRow], best: ComparisonRow | None) -> list[ComparisonRow]:
    """Sort rows: the recommended one, the others that fit and that train.py accepts, then those that train.py rejects.

    Each group is sorted by step time. Rows that do not fit come last, sorted by device memory.
    """
    accepted = [row for row in rows if row.recommendable and row is not best]
    rejected = [row for row in rows if row.fits and row.candidate.rejection]
    too_large = [row for row in rows if not row.fits]
    return [*([best] if best else []), *sorted(accepted, key=lambda row: row.step_seconds),
            *sorted(rejected, key=lambda row: row.step_seconds),
            *sorted(too_large, key=lambda row: (bool(row.candidate.rejection), row.estimate.device_bytes))]


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
