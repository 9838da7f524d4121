"""How long a step should take: FLOPs at an assumed share of the peak rate, and traffic at the stated bandwidths.

A model to compare layouts with, not a measurement: it knows nothing of latencies, of small matrices' efficiency, or of
other jobs on the same network.
"""

from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.memory.estimate.model_shape import ModelShape
from pretrain.memory.estimate.pipeline_stages import layer_work, pipeline_stage_layers
from pretrain.memory.hardware import Cluster
from pretrain.memory.step_time.traffic import PHASES, RankParameters, Transfer, passes

KERNEL_EFFICIENCY = 0.55  # of the peak rate, while the device computes and waits for nothing
LINK_EFFICIENCY = 0.8  # of a link's stated bandwidth
HOST_ADAM_RATE = 100e9  # bytes a second of a node's memory that DeepSpeedCPUAdam reads and writes: an assumption
_FORWARD_SHARE = {"forward": 1 / 3, "backward": 2 / 3}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest stage; what overlaps is counted where it is waited for."""

    compute_seconds: float  # all micro-batches, recomputation included
    bubble_seconds: float
    network_seconds: float
    pcie_seconds: float
    disk_seconds: float
    optimizer_seconds: float
    model_flops: float  # of the whole step, recomputation not counted
    peak_flops: float  # of all devices, a second

    @property
    def total_seconds(self) -> float:
        return self.compute_seconds + self.bubble_seconds + self.network_seconds + self.pcie_seconds + \
            self.disk_seconds + self.optimizer_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs as a share of what the devices' peak rate would give."""
        return self.model_flops / self.total_seconds / self.peak_flops

    @property
    def bubble_share(self) -> float:
        return self.bubble_seconds / self.total_seconds

    @property
    def communication_share(self) -> float:
        """Of the step: waiting for network, PCIe and disk."""
        return (self.network_seconds + self.pcie_seconds + self.disk_seconds) / self.total_seconds


def model_flops_per_token(shape: ModelShape | None, num_parameters: int, seq_length: int) -> float:
    """Forward and backward, recomputation not counted: `pretrain.monitor.peak_flops.flops_per_token` for any shape.

    6 x parameters that a token is multiplied with + 12 layers * heads * head_size * T; without a shape 6 x parameters.
    """
    if shape is None:
        return 6.0 * num_parameters
    look_ups = shape.position_rows * shape.hidden_size
    if not shape.tie_word_embeddings:
        look_ups += shape.vocab_size * shape.hidden_size
    norm = {"layernorm": 2, "rmsnorm": 1}.get(shape.norm, 0) * shape.hidden_size  # the last one, as there
    matrices = shape.active_parameters() - look_ups - norm
    return 6.0 * matrices + 12.0 * shape.num_layers * shape.num_heads * shape.head_size * seq_length


def stage_share(layout: Layout, shape: ModelShape, flops_per_token: float) -> float:
    """The slowest stage's FLOPs as a multiple of the average stage's: the head makes the last one slow."""
    if layout.pipeline_stages == 1:
        return 1.0
    slowest = max(sum(layer_work(shape, layer, layout.seq_length)
                      for layer in pipeline_stage_layers(shape, layout, stage))
                  for stage in range(layout.pipeline_stages))
    return max(1.0, 6.0 * slowest * layout.pipeline_stages / flops_per_token)


def step_time(layout: Layout, cluster: Cluster, rows: list[Transfer], part: RankParameters, *, flops_per_token: float,
              slowest: float = 1.0, kernel_efficiency: float = KERNEL_EFFICIENCY) -> StepTime:
    """Seconds of a step.

    Args:
        part: elements of the rank's part of the model before ZeRO divides it.
        slowest: the slowest stage's work as a multiple of the average stage's.
    """
    flops = flops_per_token * layout.tokens_per_step
    peak = cluster.peak_flops(layout.precision)
    compute = flops / layout.world_size / (peak * kernel_efficiency) * slowest
    recomputed = compute / 3 * (passes(layout) - 1)
    waits = {"network": 0.0, "pcie": 0.0, "disk": 0.0}
    for phase in PHASES:
        own = compute * _FORWARD_SHARE.get(phase, 0.0) + (recomputed if phase == "backward" else 0.0)
        for link, seconds in _waits(layout, cluster, [row for row in rows if row.phase == phase], own).items():
            waits[link] += seconds
    stages, steps = layout.pipeline_stages, layout.gradient_accumulation_steps
    return StepTime(
        compute_seconds=compute + recomputed, bubble_seconds=(compute + recomputed) * (stages - 1) / steps,
        network_seconds=waits["network"], pcie_seconds=waits["pcie"], disk_seconds=waits["disk"],
        optimizer_seconds=_optimizer_seconds(layout, cluster, part.owned(layout)),
        model_flops=flops, peak_flops=peak * layout.world_size)


def _waits(layout: Layout, cluster: Cluster, rows: list[Transfer], compute: float) -> dict[str, float]:
    """Seconds that a phase waits for each link: those that overlap run beside the computation and each other."""
    free: dict[str, float] = {}
    beside: dict[str, float] = {}
    for row in rows:
        times = beside if row.overlaps else free
        times[row.link] = times.get(row.link, 0.0) + row.bytes / rate_of(row, layout, cluster)
    slowest = max(beside, key=lambda link: beside[link], default=None)
    if slowest is not None:
        free[slowest] = free.get(slowest, 0.0) + max(0.0, beside[slowest] - compute)
    return free


def rate_of(row: Transfer, layout: Layout, cluster: Cluster) -> float:
    """Bytes a second that one rank gets. A ring of ranks is as fast as its slowest link: between nodes it has the
    network adapters of as many devices as it has ranks in a node.
    """
    if row.link == "pcie":
        return cluster.gpu.pcie_rate * LINK_EFFICIENCY
    if row.link == "disk":
        return max(cluster.nvme_rate, 1.0) / min(cluster.gpus_per_node, layout.world_size) * LINK_EFFICIENCY
    in_node = max(1, min(row.ranks, cluster.gpus_per_node // row.stride))
    if in_node == row.ranks:
        return cluster.gpu.peer_rate * LINK_EFFICIENCY
    return max(1.0, min(cluster.gpu.peer_rate, in_node * cluster.network_rate)) * LINK_EFFICIENCY


def _optimizer_seconds(layout: Layout, cluster: Cluster, elements: float) -> float:
    """The update reads gradient, master and moments, and writes the last two and the parameter."""
    moved = elements * (4 + 8 * (1 + layout.optimizer_moments) + layout.element_bytes)
    if layout.offload_optimizer == "none":
        return moved / cluster.gpu.memory_rate
    ranks_of_node = min(cluster.gpus_per_node, layout.world_size)
    ratio = layout.offload_optimizer_ratio
    return ratio * moved * ranks_of_node / HOST_ADAM_RATE + (1 - ratio) * moved / cluster.gpu.memory_rate
