"""DeepSpeed's own estimators of model states, to stand beside ours.

Their two functions are taken out of the installed sources and run as they are: importing DeepSpeed takes seconds.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.model_shape import ModelShape

_FILES = {"estimate_zero2_model_states_mem_needs": "runtime/zero/stage_1_and_2.py",
          "estimate_zero3_model_states_mem_needs": "runtime/zero/stage3.py"}


@dataclass(frozen=True)
class DeepSpeedEstimate:
    """What DeepSpeed says of a layout, and why it says something else than we do."""

    device_bytes: int  # of a rank
    host_bytes: int  # of a node
    differs: tuple[str, ...]  # what it does not see, or counts in another way


def deepspeed_estimate(layout: Layout, *, num_parameters: int, shape: ModelShape | None, nodes: int,
                       gpus_per_node: int) -> DeepSpeedEstimate | None:
    """DeepSpeed's answer, with its own default arguments. None: it has no estimator for this layout."""
    if layout.zero_stage not in (2, 3) or (layout.zero_stage == 3 and shape is None):
        return None
    offloaded = layout.offload_optimizer != "none"
    given: dict[str, Any] = {"total_params": num_parameters, "num_gpus_per_node": gpus_per_node, "num_nodes": nodes,
                             "cpu_offload": offloaded}
    if layout.zero_stage == 2:
        host, device = _estimator("estimate_zero2_model_states_mem_needs")(**given)
    else:
        assert shape is not None
        host, device, _ = _estimator("estimate_zero3_model_states_mem_needs")(
            **given, largest_layer_params=largest_layer_parameters(shape),
            cpu_offload_params=layout.offload_param != "none")
    return DeepSpeedEstimate(device, host, tuple(_differences(layout, offloaded)))


def largest_layer_parameters(shape: ModelShape) -> int:
    """Of the largest module with parameters of its own, as stage3.model_to_params takes a layer to be."""
    modules: dict[tuple[int, str], int] = {}
    for number, layer in enumerate(shape.layers()):
        for tensor in layer.tensors:
            key = (number, tensor.name.rpartition(".")[0])
            modules[key] = modules.get(key, 0) + tensor.size
    return max(modules.values())


def _differences(layout: Layout, offloaded: bool) -> list[str]:
    """Read in the two functions of DeepSpeed 0.19.8."""
    said = ["no activations, no buckets"]
    if layout.zero_stage == 2 and offloaded:
        said.append("no gradients on the device; the host of each node has the whole model's states, or an fp32 copy "
                    "of it for each rank of all nodes")
    elif layout.zero_stage == 2:
        said.append("18 bytes a parameter divided: fp16 gradients and a lasting fp32 copy of them")
    elif not offloaded:
        said.append("18 bytes a parameter divided, and one whole layer in fp32")
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        said.append("NVMe counted as host memory")
    if offloaded:
        said.append("1.5 times the host's memory, as a reserve")
    if layout.precision == "fp32":
        said.append("mixed precision assumed")
    if layout.optimizer_moments != 2:
        said.append("Adam assumed")
    shared = layout.tensor_parallel_size * layout.sequence_parallel_size * layout.expert_parallel_size
    if shared > 1:
        said.append("all ranks taken as data-parallel ones")
    return said


@functools.cache
def _estimator(name: str) -> Callable[..., Any]:
    """The function of that name, compiled from its own lines of DeepSpeed's source: pure arithmetic."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        raise ConfigError("deepspeed", found="no such package", expected="it installed", remedy="launch/setup.sh")
    lines = (Path(spec.origin).parent / _FILES[name]).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"def {name}("))
    end = next(number for number in range(start + 1, len(lines)) if lines[number].startswith("def "))
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines[start:end]), _FILES[name], "exec"), scope)  # nothing but DeepSpeed's own code
    return cast(Callable[..., Any], scope[name])
