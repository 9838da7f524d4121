"""Calibration: the step-time model's parameters, fitted to runs that were measured."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrain.errors import ConfigError, format_number
from pretrain.extensions.planner.step_time.measured_run import MeasuredRun, read_measured_run
from pretrain.extensions.planner.step_time.time_model import StepTime, predict_step
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters, fit
from pretrain.memory.hardware import Cluster, Gpu, cpu_cluster, find_gpu, gpu_by_label, make_cluster

# Launch of a kernel: the time of PyTorch's and DeepSpeed's Python code for it; measured on one thread.
CPU_PARAMETERS = replace(DEFAULT_PARAMETERS, launch_seconds=4e-5, overlap_cost=1.0)
# Weight of the squared logarithm of a change: parameters that the runs hardly determine remain near their first values.
_PRIOR = 2e-4


@dataclass(frozen=True)
class Calibration:
    """Fitted parameters, and how well they describe the runs."""

    parameters: TimeParameters
    fitted: tuple[str, ...]  # names of the parameters that were fitted
    runs: tuple[MeasuredRun, ...]
    gpu: Gpu | None  # None: the runs used CPUs
    before: tuple[StepTime, ...]  # predictions for the runs, with the parameters before the calibration
    after: tuple[StepTime, ...]


def calibrate(paths: Sequence[str], gpu: str | None = None) -> Calibration:
    """Fit the parameters to the runs in some run folders.

    Args:
        gpu: the value of --gpu; None: the one that the runs used.

    Raises:
        ConfigError: a run cannot be used, the runs used different hardware, or other hardware than --gpu.
    """
    runs = tuple(read_measured_run(path) for path in paths)
    device = _device_of(runs, gpu)
    start = DEFAULT_PARAMETERS if device else CPU_PARAMETERS
    before = tuple(predict_run(run, start) for run in runs)
    names = _names_to_fit(runs, before)
    found = fit(start, names, lambda parameters: sum(_error(run, parameters) for run in runs) +
                sum(_PRIOR * math.log(getattr(parameters, name) / getattr(start, name)) ** 2 for name in names))
    return Calibration(found, names, runs, device, before, tuple(predict_run(run, found) for run in runs))


def _device_of(runs: Sequence[MeasuredRun], gpu: str | None) -> Gpu | None:
    """Return the GPU of the runs; None if they used CPUs."""
    devices = {run.gpu_name or f"CPU {run.host.get('cpu')}": run for run in runs}
    if len(devices) > 1:
        raise ConfigError("--calibrate", problem=f"the runs used different devices: {', '.join(devices)}",
                          remedy="Name only runs on the devices that the layouts are for")
    (name, run), = devices.items()
    if not run.gpu_name:
        if gpu not in (None, "cpu"):
            raise ConfigError("--calibrate", problem=f"{run.path} ran on CPUs, which say nothing about --gpu {gpu}",
                              remedy="Name a run on that GPU, or leave --gpu out")
        return None
    device = gpu_by_label(run.gpu_name, run.gpu_memory_bytes)
    if device is None:
        raise ConfigError("--calibrate", problem=f"{run.path} ran on {name}, which is not in the table of GPUs",
                          remedy="Add it to GPUS in pretrain/memory/hardware.py")
    if gpu is not None and (gpu == "cpu" or find_gpu(gpu).name != device.name):
        raise ConfigError("--calibrate", problem=f"{run.path} ran on {name} ({device.name}), not on --gpu {gpu}",
                          remedy="Name a run on that device, or leave --gpu out")
    return device


def _names_to_fit(runs: Sequence[MeasuredRun], before: Sequence[StepTime]) -> tuple[str, ...]:
    """Return the parameters that the runs determine.

    One run cannot tell slow kernels from slow launches: of the two, the one that takes most of the predicted step is
    fitted. The optimizer's rate needs measured phases, the network's rate several ranks.
    """
    compute = sum(each.compute_seconds for each in before)
    launch = sum(each.launch_seconds for each in before)
    names = ["compute_speed" if compute >= launch else "launch_seconds"]
    if len(runs) > 1:
        names = ["compute_speed", "launch_seconds"]
    if all(run.phases for run in runs):
        names.append("optimizer_speed")
    if any(each.network_seconds > 0 for each in before) and all(run.phases for run in runs):
        names.append("link_efficiency")
    return tuple(names)


def _error(run: MeasuredRun, parameters: TimeParameters) -> float:
    """Return the squared error of the predicted step, as a fraction of it, and of its phases if they are known."""
    predicted = predict_run(run, parameters)
    pairs = [(run.step_seconds, predicted.total_seconds)]
    pairs += [(seconds, predicted.phases[name]) for name, seconds in run.phases.items()]
    return sum(((measured - found) / run.step_seconds) ** 2 for measured, found in pairs)


def predict_run(run: MeasuredRun, parameters: TimeParameters) -> StepTime:
    """Return the predicted time of a run's steps."""
    device = gpu_by_label(run.gpu_name, run.gpu_memory_bytes) if run.gpu_name else None
    cluster = make_cluster(gpu=device.name if device else None, world_size=run.layout.world_size, nodes=None,
                           gpus_per_node=run.host["ranks"])
    return predict_step(run.layout, cluster if device else on_cpus(cluster, run), run.model, parameters)


def on_cpus(cluster: Cluster, run: MeasuredRun) -> Cluster:
    """Return the cluster with the CPUs of a run's host instead of GPUs: each rank is a device.

    A rank has as many threads as in the run, or fewer.
    """
    threads = min(float(run.threads), run.host["cores"] / cluster.gpus_per_node)
    return cpu_cluster(cluster, memory_bytes=int(run.host["memory_bytes"]), threads=threads,
                       label=str(run.host.get("cpu")))


def calibration_lines(calibration: Calibration) -> list[str]:
    """Describe the runs, their measured and predicted times, and the fitted parameters."""
    lines = []
    for run, before, after in zip(calibration.runs, calibration.before, calibration.after, strict=True):
        lines.append(f"calibrated with {run.describe()}")
        lines.append(f"  measured {_milliseconds(run.step_seconds, run.phases)}")
        for title, time in (("before", before), ("after", after)):
            phases = _milliseconds(time.total_seconds, time.phases if run.phases else {})
            lines.append(f"  predicted {title} the calibration {phases}: "
                         f"{time.total_seconds / run.step_seconds:.2f} of the measured step")
    found = ", ".join(f"{name} {getattr(calibration.parameters, name):.3g}" for name in calibration.fitted)
    return [*lines, f"  fitted: {found}"]


def calibration_json(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration for `ds-pretrain compare --json`."""
    return {
        "parameters": asdict(calibration.parameters), "fitted": list(calibration.fitted),
        "runs": [{"path": run.path, "rows": run.rows, "measured_seconds": run.step_seconds,
                  "measured_phases": run.phases, "before": asdict(before), "after": asdict(after),
                  "before_seconds": before.total_seconds, "after_seconds": after.total_seconds}
                 for run, before, after in zip(calibration.runs, calibration.before, calibration.after, strict=True)]}


def _milliseconds(seconds: float, phases: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {format_number(each * 1e3, 4)}" for name, each in phases.items())
    return f"{format_number(seconds * 1e3, 4)} ms a step" + (f" ({parts})" if parts else "")
