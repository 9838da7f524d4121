"""DeepSpeed's own estimates of model states, which are shown next to ours.

The formulas repeat estimate_zero2_model_states_mem_needs (runtime/zero/stage_1_and_2.py) and
estimate_zero3_model_states_mem_needs (runtime/zero/stage3.py) of DeepSpeed 0.19.8 with their default arguments, because
importing deepspeed takes seconds. tests/extensions/planner/test_deepspeed_formulas.py compares both.
"""

from dataclasses import dataclass
from functools import lru_cache

from pretrain.config.layout import Layout
from pretrain.model.description import ModelConfig

_HOST_BUFFER_FACTOR = 1.5  # DeepSpeed's additional_buffer_factor


@dataclass(frozen=True)
class DeepSpeedEstimate:
    """DeepSpeed's estimate for a layout, and the reasons why it differs from ours."""

    device_bytes: int  # of one rank
    host_bytes: int  # of one node
    differs: tuple[str, ...]  # sentences about what DeepSpeed's formula ignores or counts differently


def deepspeed_estimate(layout: Layout, *, num_parameters: int, model: ModelConfig | None, nodes: int,
                       gpus_per_node: int) -> DeepSpeedEstimate | None:
    """Return DeepSpeed's estimate, or None if it has no formula for this layout."""
    offloaded = layout.offload_optimizer != "none"
    if layout.zero_stage == 2:
        device, host = zero2_bytes(num_parameters, nodes, gpus_per_node, offloaded=offloaded)
    elif layout.zero_stage == 3 and model is not None:
        device, host = zero3_bytes(num_parameters, largest_layer_parameters(model), nodes, gpus_per_node,
                                   offloaded=offloaded, offloads_parameters=layout.offload_param != "none")
    else:
        return None
    return DeepSpeedEstimate(device, host, tuple(_differences(layout, offloaded)))


def zero2_bytes(parameters: int, nodes: int, gpus_per_node: int, *, offloaded: bool) -> tuple[int, int]:
    """Return (bytes of a device, bytes of a node's host) at ZeRO stage 2, for a number of parameters."""
    gpus = nodes * gpus_per_node
    if offloaded:
        return 2 * parameters, int(parameters * max(4 * gpus, 16) * _HOST_BUFFER_FACTOR)
    return 2 * parameters + int(18 * parameters / gpus), int(parameters * 4 * gpus_per_node * _HOST_BUFFER_FACTOR)


def zero3_bytes(parameters: int, largest_layer: int, nodes: int, gpus_per_node: int, *, offloaded: bool,
                offloads_parameters: bool) -> tuple[int, int]:
    """Return (bytes of a device, bytes of a node's host) at ZeRO stage 3.

    Args:
        parameters: elements of the model.
        largest_layer: elements of the largest layer, which every device holds in fp32.
    """
    gpus, layer_bytes = nodes * gpus_per_node, 4 * largest_layer
    if not offloaded:
        return layer_bytes + int(18 * parameters / gpus), int(layer_bytes * gpus_per_node * _HOST_BUFFER_FACTOR)
    if offloads_parameters:
        return layer_bytes, int(parameters * 18 * (1 / nodes) * _HOST_BUFFER_FACTOR)
    return layer_bytes + int(2 * parameters / gpus), int(parameters * 16 * (1 / nodes) * _HOST_BUFFER_FACTOR)


@lru_cache(maxsize=16)
def largest_layer_parameters(model: ModelConfig) -> int:
    """Return the elements of the module that has the most parameters of its own (stage3.py, model_to_params)."""
    modules: dict[tuple[int, str], int] = {}
    for number, layer in enumerate(model.layers()):
        for parameter in layer.parameters:
            key = (number, parameter.name.rpartition(".")[0])
            modules[key] = modules.get(key, 0) + parameter.size
    return max(modules.values())


def _differences(layout: Layout, offloaded: bool) -> list[str]:
    """List the memory that DeepSpeed's formula for this layout ignores or counts differently."""
    differences = ["activations and buckets are not counted"]
    if layout.zero_stage == 2 and offloaded:
        differences.append("gradients on the device are not counted; each node's host holds all model states, or 4 "
                           "bytes a parameter for every rank of all nodes")
    elif layout.zero_stage == 2:
        differences.append("18 bytes a parameter are divided by the ranks, 6 of them for 16-bit gradients and their "
                           "fp32 copy")
    elif not offloaded:
        differences.append("18 bytes a parameter are divided by the ranks; every device holds the largest layer in "
                           "fp32")
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        differences.append("NVMe is counted as host memory")
    if offloaded:
        differences.append("host memory has a reserve of 50%")
    if layout.precision == "fp32":
        differences.append("mixed precision is assumed")
    if layout.optimizer_moments != 2:
        differences.append("Adam is assumed")
    if layout.tensor_parallel_size * layout.sequence_parallel_size * layout.expert_parallel_size > 1:
        differences.append("all ranks are taken as data-parallel ranks")
    return differences
