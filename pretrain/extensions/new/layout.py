"""The layout of a new run, as `ds-pretrain compare` recommends it, or the number of GPUs that would be enough."""

import math
from collections.abc import Callable
from dataclasses import replace

from pretrain.errors import ConfigError, counted, tokens_text
from pretrain.memory.compare.candidates import CandidateSet, generate_candidates
from pretrain.memory.compare.combinations import Axes
from pretrain.memory.compare.compare import (
    ComparisonRow,
    Workload,
    compare,
    estimate_candidate,
    memory_shortage,
    recommend,
)
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.hardware import MAX_GPUS_PER_NODE, Cluster
from pretrain.model.description import ModelConfig

_MOST_RANKS = 2**16  # of the search for a number that is enough


def best_layout(model: ModelConfig, cluster: Cluster, *, seq_length: int, batch_tokens: float) -> ComparisonRow:
    """Return the recommended layout, with a global batch near `batch_tokens`.

    Raises ConfigError if none fits: one line with the smallest number of GPUs that does.
    """
    workload = Workload.of(model, cluster)
    candidates = _candidates(model, cluster, seq_length=seq_length, batch_tokens=batch_tokens)
    rows = compare(candidates.candidates, workload)
    best = recommend(rows)
    if best is not None:
        return best
    possible = [candidate for candidate in candidates.candidates if not candidate.rejection]
    rejected = next((row.candidate.rejection for row in rows if row.fits or not possible), "")
    if rejected:
        raise ConfigError("layouts", problem=f"those that {'fit' if possible else 'exist'} are rejected: {rejected}")
    smallest = min((estimate_candidate(candidate, workload) for candidate in possible),
                   key=lambda row: row.estimate.device_bytes)
    enough = smallest_world_size(cluster, lambda larger: _any_fits(model, larger, seq_length))
    what = "rank" if cluster.gpu.kind == "cpu" else f"{cluster.gpu.name} GPU"
    larger = f"at least {counted(enough, what)}" if enough else "larger GPUs"
    raise ConfigError("--world_size", problem=(
        f"{tokens_text(model.num_parameters())} parameters do not fit {counted(cluster.world_size, what)}; the layout "
        f"that needs the least of their memory, {smallest.candidate.name}, is too large for {smallest.shortage}"),
        remedy=f"give {larger}, or a smaller model")


def _candidates(model: ModelConfig, cluster: Cluster, *, seq_length: int, batch_tokens: float,
                micro_batch_sizes: tuple[int, ...] = ()) -> CandidateSet:
    """Return the candidates of `ds-pretrain compare`, without NVMe, and on CPUs without offload.

    The batch of a rank is a power of two, so that micro-batches of any power of two divide it.
    """
    of_rank = 2 ** max(0, round(math.log2(max(1.0, batch_tokens / seq_length / cluster.world_size))))
    axes = Axes(offloads=("none",) if cluster.gpu.kind == "cpu" else ("none", "optimizer_cpu", "all_cpu"),
                seq_lengths=(seq_length,), global_batch_size=of_rank * cluster.world_size,
                micro_batch_sizes=micro_batch_sizes)
    return generate_candidates(axes, cluster, model, device_kind=cluster.gpu.kind)


def _any_fits(model: ModelConfig, cluster: Cluster, seq_length: int) -> bool:
    """Return whether any layout fits with micro-batches of one sample."""
    candidates = _candidates(model, cluster, seq_length=seq_length, batch_tokens=0, micro_batch_sizes=(1,)).candidates
    return any(not candidate.rejection and not memory_shortage(estimate_memory(model, candidate.layout), cluster)
               for candidate in candidates)


def smallest_world_size(cluster: Cluster, fits: Callable[[Cluster], bool]) -> int:
    """Return the smallest number of GPUs above the cluster's that fits; 0 if 65,536 do not.

    Up to 8 GPUs form one node, and more GPUs form nodes of 8, or of the cluster's number if it has several nodes.
    The search assumes that more GPUs fit as well.
    """
    of_node = cluster.gpus_per_node if cluster.nodes > 1 else max(MAX_GPUS_PER_NODE, cluster.gpus_per_node)

    def larger(ranks: int) -> Cluster:
        nodes, gpus_per_node = (-(-ranks // of_node), of_node) if ranks > of_node else (1, ranks)
        host = cluster.host_memory_bytes // cluster.gpus_per_node * gpus_per_node
        return replace(cluster, nodes=nodes, gpus_per_node=gpus_per_node, host_memory_bytes=host)

    low = high = cluster.world_size
    while not (high > low and fits(larger(high))):
        low, high = high, min(2 * high, of_node) if high < of_node else 2 * high
        if high > _MOST_RANKS:
            return 0
    step = 1 if high <= of_node else of_node
    low = low // step * step
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (low, middle) if fits(larger(middle)) else (middle, high)
    return larger(high).world_size
