"""Estimated time of a step: FLOPs at a fraction of the peak rate, and traffic at the stated bandwidths.

The estimate compares layouts; it is not a measurement. It ignores latencies, the lower efficiency of small matrices,
and other jobs on the same network.
"""

from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.pipeline_stages import layer_work, pipeline_stage_layers
from pretrain.memory.hardware import Cluster
from pretrain.memory.step_time.recomputed_work import fraction_in_blocks, recomputed_fraction
from pretrain.memory.step_time.traffic import PHASES, RankParameters, Transfer
from pretrain.model.flops import keys_per_query

KERNEL_EFFICIENCY = 0.55  # fraction of the peak rate while the device computes: an assumption
LINK_EFFICIENCY = 0.8  # fraction of a link's stated bandwidth that transfers reach: an assumption
HOST_ADAM_RATE = 100e9  # bytes a second of a node's memory that DeepSpeedCPUAdam reads and writes: an assumption
_COMPUTE_FRACTION = {"forward": 1 / 3, "backward": 2 / 3}  # of a step's FLOPs without recomputation


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest pipeline stage. The field names are keys of `compare_zero.py --json`.

    Transfers count only for the time that the computation waits for them.
    """

    compute_seconds: float  # all micro-batches, recomputation included
    bubble_seconds: float  # the stage idles while the pipeline fills and drains
    network_seconds: float
    pcie_seconds: float
    disk_seconds: float
    optimizer_seconds: float
    model_flops: float  # of a step on all devices, without recomputation
    peak_flops: float  # of all devices, per second

    @property
    def total_seconds(self) -> float:
        return self.compute_seconds + self.bubble_seconds + self.network_seconds + self.pcie_seconds + \
            self.disk_seconds + self.optimizer_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs as a fraction of what the peak rate would allow."""
        return self.model_flops / self.total_seconds / self.peak_flops

    @property
    def bubble_share(self) -> float:
        """Fraction of the step that is the pipeline bubble."""
        return self.bubble_seconds / self.total_seconds

    @property
    def communication_share(self) -> float:
        """Fraction of the step that waits for network, PCIe and disk."""
        return (self.network_seconds + self.pcie_seconds + self.disk_seconds) / self.total_seconds


def model_flops_per_token(shape: ModelShape | None, num_parameters: int, seq_length: int) -> float:
    """Return the FLOPs of forward and backward pass per token, without recomputation (like model/flops.py).

    6 * (parameters that a token is multiplied with) + 12 * heads * head_size * (keys per query, summed over layers).
    Without a shape: 6 * num_parameters.
    """
    if shape is None:
        return 6.0 * num_parameters
    look_ups = shape.position_rows * shape.hidden_size
    if not shape.tie_word_embeddings:
        look_ups += shape.vocab_size * shape.hidden_size
    final_norm = {"layernorm": 2, "rmsnorm": 1}.get(shape.norm, 0) * shape.hidden_size
    multiplied = shape.active_parameters() - look_ups - final_norm
    windows = shape.windows or (0,) * shape.num_layers
    keys = sum(keys_per_query(window, seq_length) for window in windows)
    return 6.0 * multiplied + 12.0 * shape.num_heads * shape.head_size * keys


def pipeline_imbalance(layout: Layout, shape: ModelShape, flops_per_token: float) -> float:
    """Return the FLOPs of the slowest pipeline stage as a multiple of the average stage's.

    The head makes the last pipeline stage slow.
    """
    if layout.pipeline_stages == 1:
        return 1.0
    slowest = max(sum(layer_work(shape, layer, layout.seq_length)
                      for layer in pipeline_stage_layers(shape, layout, stage))
                  for stage in range(layout.pipeline_stages))
    return max(1.0, 6.0 * slowest * layout.pipeline_stages / flops_per_token)


def estimate_step_time(layout: Layout, cluster: Cluster, shape: ModelShape, transfers: list[Transfer],
                       parameters: RankParameters, *, flops_per_token: float,
                       kernel_efficiency: float = KERNEL_EFFICIENCY) -> StepTime:
    """Estimate the time of a step.

    Recomputation repeats the forward pass of blocks or of parts of them; the forward pass is a third of the FLOPs. The
    bubble of a pipeline with p stages and m micro-batches is (p - 1) / m of the computation.

    Args:
        parameters: of the rank of the largest pipeline stage, before ZeRO divides them.
    """
    flops, peak = flops_per_token * layout.tokens_per_step, cluster.peak_flops(layout.precision)
    compute = flops / layout.world_size / (peak * kernel_efficiency)
    compute *= pipeline_imbalance(layout, shape, flops_per_token)
    recomputed = compute / 3 * recomputed_fraction(layout, shape) * fraction_in_blocks(shape, layout.seq_length)
    waits = {"network": 0.0, "pcie": 0.0, "disk": 0.0}
    for phase in PHASES:
        phase_compute = compute * _COMPUTE_FRACTION.get(phase, 0.0) + (recomputed if phase == "backward" else 0.0)
        phase_transfers = [transfer for transfer in transfers if transfer.phase == phase]
        for link, seconds in _waits(layout, cluster, phase_transfers, phase_compute).items():
            waits[link] += seconds
    stages, steps = layout.pipeline_stages, layout.gradient_accumulation_steps
    return StepTime(
        compute_seconds=compute + recomputed, bubble_seconds=(compute + recomputed) * (stages - 1) / steps,
        network_seconds=waits["network"], pcie_seconds=waits["pcie"], disk_seconds=waits["disk"],
        optimizer_seconds=_optimizer_seconds(layout, cluster, parameters.after_zero(layout)),
        model_flops=flops, peak_flops=peak * layout.world_size)


def _waits(layout: Layout, cluster: Cluster, transfers: list[Transfer], compute: float) -> dict[str, float]:
    """Return the seconds that a phase waits for each link.

    Overlapping transfers run at the same time as the computation and as one another, so that only the slowest of their
    links can cause a wait.

    Args:
        compute: seconds of the phase's computation.
    """
    waits: dict[str, float] = {}
    overlapped: dict[str, float] = {}
    for transfer in transfers:
        times = overlapped if transfer.overlaps else waits
        times[transfer.link] = times.get(transfer.link, 0.0) + transfer.bytes / _link_rate(transfer, layout, cluster)
    slowest = max(overlapped, key=lambda link: overlapped[link], default=None)
    if slowest is not None:
        waits[slowest] = waits.get(slowest, 0.0) + max(0.0, overlapped[slowest] - compute)
    return waits


def _link_rate(transfer: Transfer, layout: Layout, cluster: Cluster) -> float:
    """Return the bytes per second that one rank gets.

    A ring of ranks is as fast as its slowest link. Between nodes it uses the network adapters of all its GPUs in one
    node.
    """
    if transfer.link == "pcie":
        return cluster.gpu.pcie_rate * LINK_EFFICIENCY
    if transfer.link == "disk":
        return max(cluster.nvme_rate, 1.0) / min(cluster.gpus_per_node, layout.world_size) * LINK_EFFICIENCY
    ranks_in_node = max(1, min(transfer.ranks, cluster.gpus_per_node // transfer.stride))
    if ranks_in_node == transfer.ranks:
        return cluster.gpu.peer_rate * LINK_EFFICIENCY
    return max(1.0, min(cluster.gpu.peer_rate, ranks_in_node * cluster.network_rate)) * LINK_EFFICIENCY


def _optimizer_seconds(layout: Layout, cluster: Cluster, elements: float) -> float:
    """Return the seconds of the optimizer's memory traffic.

    The optimizer reads gradient, master weight and states in fp32. It writes master weight and states in fp32, and the
    parameter in the model's precision.
    """
    traffic = elements * (4 + 8 * (1 + layout.optimizer_moments) + layout.element_bytes)  # bytes
    if layout.offload_optimizer == "none":
        return traffic / cluster.gpu.memory_rate
    ranks_per_node = min(cluster.gpus_per_node, layout.world_size)
    on_host = layout.offload_optimizer_ratio
    return on_host * traffic * ranks_per_node / HOST_ADAM_RATE + (1 - on_host) * traffic / cluster.gpu.memory_rate
