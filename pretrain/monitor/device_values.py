"""Values that a rank reads from its device and its host: memory, power and peak rate."""

import contextlib
import functools

import torch
from deepspeed.accelerator import get_accelerator

from pretrain.config.validate import Plan
from pretrain.distributed.process import resident_bytes
from pretrain.monitor.peak_flops import peak_tflops


def memory_bytes() -> tuple[int, int]:
    """Return (current, peak) memory: of torch's allocator on a GPU, resident memory of this process on a CPU."""
    device = get_accelerator()
    if device.device_name() != "cpu":
        return device.memory_allocated(), device.max_memory_allocated()
    return resident_bytes()


def device_peak_tflops(plan: Plan) -> float | None:
    """Return --peak_tflops, or the rate of this device from the data sheets; None on a CPU and on unknown devices."""
    if plan.args.peak_tflops is not None:
        return plan.args.peak_tflops
    precision = "tf32" if plan.args.tf32 else plan.layout.precision
    return None if get_accelerator().device_name() == "cpu" else peak_tflops(torch.cuda.get_device_name(), precision)


def power_watts() -> float | None:
    """Return the power that this rank's GPU draws; None without NVIDIA's library NVML or its package (pynvml)."""
    if not torch.cuda.is_available() or _without_nvml():
        return None
    with contextlib.suppress(Exception):  # NVML has errors of its own: no permission, a device without a sensor
        return torch.cuda.power_draw() / 1e3
    return None


@functools.cache
def _without_nvml() -> bool:
    """Try once: a missing package would be searched for in each logged step."""
    try:
        torch.cuda.power_draw()
    except Exception:
        return True
    return False
