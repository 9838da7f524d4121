"""Estimated time of a step: kernels by their shapes, launches by the host, and traffic with latencies.

The estimate compares layouts; it is not a measurement. README.md compares it with published measurements. It
ignores other jobs on the same network, the loading of data, and devices that are slower than others of their kind.
"""

import math
from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.extensions.planner.step_time.block_traffic import PHASES, Transfer
from pretrain.extensions.planner.step_time.kernel_time import layer_times
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters
from pretrain.extensions.planner.step_time.traffic import RankParameters, rank_parameters, step_traffic
from pretrain.memory.estimate.rank import distinct_stages, pipeline_stage_layers
from pretrain.memory.hardware import Cluster
from pretrain.model.description import ModelConfig
from pretrain.model.flops import flops_per_token
from pretrain.model.recomputed_flops import recomputed_fraction

# Microseconds with NCCL's protocol LL128 (src/graph/tuning.cc, baseLat and hwLat): the start of a collective, and each
# step of a ring over NVLink, PCIe or the network. A tree has steps between nodes and, inside them, a chain of GPUs.
# NVLink is assumed above 100 GB/s.
_START, _NVLINK_STEP, _PCIE_STEP, _NETWORK_STEP = 14.0, 1.9, 2.5, 4.0
_TREE_NETWORK_STEP, _TREE_NODE_STEP = 8.5, 1.25
_NVLINK_RATE = 100e9
_GLOO_MESSAGE = 300e-6  # seconds of a collective between processes on CPUs: an assumption
# Host time in units of a kernel's launch. Measured with models whose kernels are shorter than their Python code, on one
# rank of a CPU (4 and 12 layers, 64 wide, 64 tokens, 1 and 4 micro-batches, ZeRO 0 to 3): hooks of ZeRO-3 for each
# parameter and pass, of ZeRO-2 and 3 for each gradient, and the engine's work for each parameter in a step.
_GATHER_HOOK, _GRADIENT_HOOK, _STEP_WORK = 3.0, 2.5, 1.5


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest pipeline stage. The field names are keys of `ds-pretrain compare --json`.

    Transfers count only for the time that the computation waits for them.
    """

    compute_seconds: float  # kernels of all micro-batches, recomputation included
    launch_seconds: float  # the device waits for the host to launch kernels
    bubble_seconds: float  # the stage idles while the pipeline fills and drains
    network_seconds: float
    pcie_seconds: float
    disk_seconds: float
    optimizer_seconds: float
    # The same time without the bubble, by phase: all forward passes, all backward passes, and what follows them once.
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    model_flops: float  # of a step on all devices, without recomputation
    peak_flops: float  # of all devices, per second

    @property
    def total_seconds(self) -> float:
        return self.compute_seconds + self.launch_seconds + self.bubble_seconds + self.network_seconds + \
            self.pcie_seconds + self.disk_seconds + self.optimizer_seconds

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, under the names of MeasuredRun.phases."""
        return {"forward": self.forward_seconds, "backward": self.backward_seconds, "update": self.update_seconds}

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


@dataclass(frozen=True)
class StageTime:
    """Seconds that the device of one pipeline stage computes in a step, by phase, and that its host needs for it.

    The host launches kernels and runs the hooks of ZeRO.
    """

    device: dict[str, float]
    host: dict[str, float]

    @property
    def slowest(self) -> float:
        return sum(max(self.device[phase], self.host[phase]) for phase in PHASES)


def stage_time(layout: Layout, cluster: Cluster, model: ModelConfig, pipeline_stage: int, parameters: TimeParameters,
               again: float) -> StageTime:
    """Return the times of all micro-batches, recomputation included; the device's without transfers and optimizer.

    Args:
        again: fraction of the blocks' forward pass that is recomputed.
    """
    layers = pipeline_stage_layers(model, layout, pipeline_stage)
    times = layer_times(layers, model, layout, cluster, parameters)
    blocks = [time for layer, time in zip(layers, times, strict=True) if layer.kind == "block"]
    steps = layout.gradient_accumulation_steps
    forward = sum(each.forward for each in times)
    backward = sum(each.backward for each in times) + again * sum(each.forward for each in blocks)
    forward_kernels = sum(each.forward_kernels for each in times)
    backward_kernels = sum(each.backward_kernels for each in times) + \
        again * sum(each.forward_kernels for each in blocks)
    tensors = sum(len(layer.parameters) for layer in layers)
    gather = _GATHER_HOOK * tensors if layout.zero_stage == 3 else 0.0
    recomputed = gather if layout.recomputation.is_on else 0.0
    reduce = _GRADIENT_HOOK * tensors if layout.zero_stage >= 2 else 0.0
    forward_host, backward_host = forward_kernels + gather, backward_kernels + gather + recomputed + reduce
    launch = parameters.launch_seconds
    return StageTime({"forward": steps * forward, "backward": steps * backward, "step": 0.0},
                     {"forward": steps * forward_host * launch, "backward": steps * backward_host * launch,
                      "step": _STEP_WORK * tensors * launch})


def predict_step(layout: Layout, cluster: Cluster, model: ModelConfig,
                 rates: TimeParameters = DEFAULT_PARAMETERS) -> StepTime:
    """Estimate the time of a step, with the traffic of the rank that has most parameters."""
    parameters = rank_parameters(layout, model, 0)
    return estimate_step_time(layout, cluster, model, step_traffic(layout, parameters, model), parameters, rates)


def estimate_step_time(layout: Layout, cluster: Cluster, model: ModelConfig, transfers: list[Transfer],
                       parameters: RankParameters, rates: TimeParameters) -> StepTime:
    """Estimate the time of a step with known traffic.

    Kernels run while the host launches the next ones: a phase takes as long as the slower of the two. CPUs do both one
    after the other. The bubble of a pipeline with p stages and m micro-batches is (p - 1) / m of the computation.

    Args:
        parameters: of the rank of the largest pipeline stage, before ZeRO divides them.
    """
    again = recomputed_fraction(model, layout.recomputation, layout.seq_length)
    slowest = max((stage_time(layout, cluster, model, stage, rates, again) for stage in distinct_stages(model, layout)),
                  key=lambda stage: stage.slowest)
    optimizer = _optimizer_seconds(layout, cluster, parameters.after_zero(layout), rates)
    waits = {"network": 0.0, "pcie": 0.0, "disk": 0.0}
    launch, total = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    for phase in PHASES:
        compute, host = slowest.device[phase], slowest.host[phase]
        own = _waits(layout, cluster, [each for each in transfers if each.phase == phase], compute, rates)
        for link, seconds in own.items():
            waits[link] += seconds
        busy = compute + sum(own.values()) + (optimizer if phase == "step" else 0.0)
        launch[phase] = host if cluster.gpu.kind == "cpu" else max(0.0, host - busy)
        total[phase] = busy + launch[phase]
    compute = slowest.device["forward"] + slowest.device["backward"]
    # The data sheet of a CPU has no such rate: there it is the rate of products that the calibration found.
    peak = cluster.gpu.peak_flops(layout.precision) * (rates.compute_speed if cluster.gpu.kind == "cpu" else 1.0)
    idle = (layout.pipeline_stages - 1) / layout.gradient_accumulation_steps
    return StepTime(
        compute_seconds=compute, launch_seconds=sum(launch.values()),
        bubble_seconds=(compute + launch["forward"] + launch["backward"]) * idle,
        network_seconds=waits["network"], pcie_seconds=waits["pcie"], disk_seconds=waits["disk"],
        optimizer_seconds=optimizer, forward_seconds=total["forward"], backward_seconds=total["backward"],
        update_seconds=total["step"], model_flops=flops_per_token(model, layout.seq_length) * layout.tokens_per_step,
        peak_flops=peak * layout.world_size)


def _waits(layout: Layout, cluster: Cluster, transfers: list[Transfer], compute: float,
           rates: TimeParameters) -> dict[str, float]:
    """Return the seconds that transfers add to a phase, by link.

    Overlapping transfers run at the same time as the computation and as one another, so that only the slowest of their
    links can cause a wait. Collectives that overlap slow the computation down (TimeParameters.overlap_cost).

    A send to another pipeline stage takes as long as that of the complete tensor, of which each tensor-parallel rank
    sends its shard: it also stands for the waits of stages for each other. Without this, and with all parameters fitted
    again, the error of published rows that were not used for the fit is 22% instead of 17%.

    Args:
        compute: seconds of the phase's computation.
    """
    waits: dict[str, float] = {}
    overlapped: dict[str, float] = {}
    for transfer in transfers:
        times = overlapped if transfer.overlaps else waits
        seconds = transfer.bytes / (_link_rate(transfer, layout, cluster) * rates.link_efficiency)
        if "pipeline stage" in transfer.what:
            seconds *= layout.tensor_parallel_size
        if transfer.link == "network":
            seconds += transfer.messages * collective_latency(transfer, cluster)
        times[transfer.link] = times.get(transfer.link, 0.0) + seconds
    slowest = max(overlapped, key=lambda link: overlapped[link], default=None)
    if slowest is not None:
        hidden = min(compute, overlapped.get("network", 0.0)) * rates.overlap_cost
        waits["network"] = waits.get("network", 0.0) + hidden
        waits[slowest] = waits.get(slowest, 0.0) + max(0.0, overlapped[slowest] - compute)
    return waits


def _link_rate(transfer: Transfer, layout: Layout, cluster: Cluster) -> float:
    """Return the stated bytes per second of the link of one rank.

    A ring of ranks is as fast as its slowest link. Between nodes it uses the network adapters of all its GPUs in one
    node.
    """
    if transfer.link == "pcie":
        return cluster.gpu.pcie_rate
    if transfer.link == "disk":
        return max(cluster.nvme_rate, 1.0) / min(cluster.gpus_per_node, layout.world_size)
    ranks_in_node = max(1, min(transfer.ranks, cluster.gpus_per_node // transfer.stride))
    if ranks_in_node == transfer.ranks:
        return cluster.gpu.peer_rate
    return max(1.0, min(cluster.gpu.peer_rate, ranks_in_node * cluster.network_rate))


def _optimizer_seconds(layout: Layout, cluster: Cluster, elements: float, rates: TimeParameters) -> float:
    """Return the seconds of the optimizer's memory traffic.

    The optimizer reads gradient, master weight and states in fp32. It writes master weight and states in fp32, and the
    parameter in the model's precision. Before it, the gradient is read for the norm, and read and written for clipping.
    """
    traffic = elements * (4 + 12 + 8 * (1 + layout.optimizer_moments) + layout.element_bytes)  # bytes
    on_device = traffic / (cluster.gpu.memory_rate * rates.memory_efficiency * rates.optimizer_speed)
    if layout.offload_optimizer == "none":
        return on_device
    ranks_per_node = min(cluster.gpus_per_node, layout.world_size)
    on_host = layout.offload_optimizer_ratio
    return on_host * traffic * ranks_per_node / (rates.host_adam_rate * rates.optimizer_speed) + \
        (1 - on_host) * on_device


def collective_latency(transfer: Transfer, cluster: Cluster) -> float:
    """Return the seconds that one message of a transfer takes without its bytes.

    An all-reduce is two rounds of a ring or, if that is shorter, of a tree. Other collectives are one round of a ring.
    """
    if transfer.ranks < 2:
        return 0.0
    if cluster.gpu.kind == "cpu":
        return _GLOO_MESSAGE
    in_node = max(1, min(transfer.ranks, cluster.gpus_per_node // transfer.stride))
    nodes = math.ceil(transfer.ranks / in_node)
    step = _NVLINK_STEP if cluster.gpu.peer_rate > _NVLINK_RATE else _PCIE_STEP
    over_network = nodes if nodes > 1 else 0
    ring = (transfer.ranks - 1 - over_network) * step + over_network * _NETWORK_STEP
    if "all-reduce" not in transfer.what:
        return (_START + ring) * 1e-6
    tree = math.log2(nodes) * _TREE_NETWORK_STEP + (in_node - 1) * _TREE_NODE_STEP
    return (_START + 2 * min(ring, tree)) * 1e-6
