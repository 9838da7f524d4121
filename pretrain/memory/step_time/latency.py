"""Latencies: what a collective takes without its bytes, and what the host needs to launch the work of a step."""

import math

from pretrain.config.layout import Layout
from pretrain.memory.hardware import Cluster
from pretrain.memory.step_time.time_parameters import TimeParameters
from pretrain.memory.step_time.traffic import Transfer

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


def host_seconds(layout: Layout, parameters: TimeParameters, *, forward_kernels: float, backward_kernels: float,
                 tensors: int) -> dict[str, float]:
    """Return the host's seconds in a step, by phase: it launches kernels and runs the hooks of ZeRO.

    Args:
        forward_kernels, backward_kernels: of one micro-batch on one rank.
        tensors: number of parameters on the rank.
    """
    gather = _GATHER_HOOK * tensors if layout.zero_stage == 3 else 0.0
    recomputed = gather if layout.recomputation.is_on else 0.0
    reduce = _GRADIENT_HOOK * tensors if layout.zero_stage >= 2 else 0.0
    forward = forward_kernels + gather
    backward = backward_kernels + gather + recomputed + reduce
    steps, launch = layout.gradient_accumulation_steps, parameters.launch_seconds
    return {"forward": steps * forward * launch, "backward": steps * backward * launch,
            "step": _STEP_WORK * tensors * launch}
