"""The row of metrics.jsonl for a logged step, whose keys monitor/rows.py defines, and its line of text."""

import contextlib
import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from pretrain.config.plan import Plan
from pretrain.distributed.device import peak_tflops
from pretrain.distributed.process import resident_bytes
from pretrain.engine.phases import BACKWARD, FORWARD, OPTIMIZER, PHASES, REDUCE, WAIT, overlaps_reduction
from pretrain.engine.recipe import recipe_values, router_values
from pretrain.engine.steps import grad_norm, loss_scale, rank_loss, skipped_steps
from pretrain.model.flops import exact_flops_per_token, flops_per_token

_COMBINED = 7 + len(PHASES)  # number of values of a rank that `combine_ranks` combines


class HighestLoss:
    """Highest mean loss of this data-parallel rank over the steps since the last row, kept on the device."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._start = self._highest = torch.full((), -torch.inf, device=engine.device)

    def observe(self) -> None:
        """Add the step that the engine has just trained. Does not wait for the device. NaN remains NaN."""
        self._highest = torch.maximum(self._highest, rank_loss(self._engine).float())

    def take(self) -> torch.Tensor:
        """Return the value, and restart. Does not wait for the device."""
        highest, self._highest = self._highest, self._start
        return highest


def gather_ranks(loss_max: torch.Tensor, *, data_seconds: float, phase_ms: dict[str, float],
                 power_watts: float | None, squares: torch.Tensor,
                 others: Sequence[float] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return what all ranks gave, one row a rank: what `combine_ranks` takes, and `others`.

    Collective; waits for the device. A rank sends 8 bytes for each value, in one operation.

    Args:
        loss_max: result of HighestLoss.take.
        squares: result of UpdateSize.take_squares.
        others: further values, equally many on all ranks.
    """
    host = [data_seconds, *(phase_ms[phase] for phase in PHASES), power_watts or 0.0, float(power_watts is not None)]
    own = torch.cat([loss_max.double().reshape(1), squares.double(),
                     torch.tensor([*host, *others], dtype=torch.float64, device=squares.device)])
    everyone = own.reshape(1, -1)
    if dist.get_world_size() > 1:
        everyone = own.new_empty(dist.get_world_size(), len(own))
        dist.all_gather(list(everyone.unbind(0)), own)
    to_combine, rest = np.split(everyone.cpu().numpy(), [_COMBINED], axis=1)
    return to_combine, rest


def combine_ranks(values: np.ndarray) -> dict[str, float | None]:
    """Combine the first values of `gather_ranks`, and return them by their keys in a row.

    Phase times are means over the ranks. The waiting time for data is the slowest rank's. The pipeline bubble is the
    fraction of the forward and backward pass in which a stage computes nothing, mean over the ranks.
    """
    loss_max, parameters, changed, sampled, data_seconds, *phases, watts, has_watts = values.T
    phase_ms = dict(zip(PHASES, phases, strict=True))
    mean_ms = {phase: float(each.mean()) for phase, each in phase_ms.items()}
    longest = float((phase_ms[FORWARD] + phase_ms[BACKWARD] + phase_ms[WAIT]).max())
    devices, total = float(has_watts.sum()), float(sampled.sum())
    return {
        "loss_max": float(loss_max.max()), "data_time_ms": float(data_seconds.max()) * 1e3,
        "forward_time_ms": mean_ms[FORWARD], "backward_time_ms": mean_ms[BACKWARD], "reduce_time_ms": mean_ms[REDUCE],
        "optimizer_time_ms": mean_ms[OPTIMIZER],
        "pipeline_bubble": 1 - (mean_ms[FORWARD] + mean_ms[BACKWARD]) / longest if longest > 0 else None,
        "power_watts": float(watts.sum()) / devices if devices else None,
        "param_norm": math.sqrt(float(parameters.sum())),
        "update_ratio": math.sqrt(float(changed.sum()) / total) if total else math.nan}


@dataclass(frozen=True)
class Interval:
    """The steps since the last row."""

    step: int  # the last of them
    steps: int
    step_seconds: float  # mean, without saves and evaluations
    consumed_samples: int  # after the last of them
    samples: int  # that they consumed
    batch_size: int  # samples of the last of them
    data_seconds: float  # waiting for data, on this rank
    save_seconds: float
    eval_seconds: float


def training_row(plan: Plan, engine: DeepSpeedEngine, interval: Interval, ranks: dict[str, float | None], *,
                 loss: float, lr: float, gradients: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the row. `ranks`: result of combine_ranks; `gradients`: result of GradientStats.take."""
    length = plan.seq_lengths.at(interval.consumed_samples - interval.batch_size)
    row = {
        "step": interval.step, "time": time.time(), "consumed_samples": interval.consumed_samples,
        "consumed_tokens": interval.consumed_samples * plan.args.seq_length, "seq_length": length,
        "global_batch_size": interval.batch_size, "loss": loss, "lr": lr, "grad_norm": grad_norm(engine), **gradients,
        "loss_scale": loss_scale(engine), "skipped_steps": skipped_steps(engine),
        "step_time_ms": interval.step_seconds * 1e3, "save_time_ms": interval.save_seconds * 1e3,
        "eval_time_ms": interval.eval_seconds * 1e3, **ranks, **_rates(plan, interval, length), **_memory(),
        "eta_seconds": eta_seconds(plan, interval), **recipe_values(engine),
        **router_values(engine, plan.model.num_layers),
    }
    if overlaps_reduction(engine):
        row["reduce_time_ms"] = None
    if plan.layout.pipeline_stages == 1:
        row["pipeline_bubble"] = None
    return row


def tokens_per_second(plan: Plan, interval: Interval) -> float:
    """Return the mean speed of an interval, without saves and evaluations."""
    return interval.samples * plan.args.seq_length / interval.steps / interval.step_seconds


def eta_seconds(plan: Plan, interval: Interval) -> float:
    """Return the time of the remaining steps at the speed of this interval, in samples: their batches may be larger."""
    remaining = plan.length.samples_between(interval.step, plan.train_steps, position=interval.consumed_samples)
    return remaining * interval.steps * interval.step_seconds / max(interval.samples, 1)


def _rates(plan: Plan, interval: Interval, length: int) -> dict[str, float | None]:
    speed = tokens_per_second(plan, interval)
    per_device = speed / plan.layout.world_size / 1e12
    tflops, exact = (per_device * count(plan.model, length) for count in (flops_per_token, exact_flops_per_token))
    peak = device_peak_tflops(plan)
    return {"tokens_per_second": speed, "tflops_per_device": tflops, "mfu": tflops / peak if peak else None,
            "tflops_exact_per_device": exact, "mfu_exact": exact / peak if peak else None}


def _memory() -> dict[str, int]:
    now_bytes, peak_bytes = memory_bytes()
    return {"memory_bytes": now_bytes, "peak_memory_bytes": peak_bytes, "host_memory_bytes": resident_bytes()[0]}


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


def format_duration(seconds: float) -> str:
    """Format as hours, minutes and seconds: 1:02:03."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def row_line(row: dict[str, Any], *, train_steps: int, fp16: bool, columns: int | None) -> str:
    """Format a training row as a line of text.

    If the line is longer than `columns`, its last parts are dropped. They are the least important parts, and the status
    line also shows the speed and the ETA.
    """
    parts = [f"step {row['step']:>7}/{train_steps}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}",
             f"grad norm {row['grad_norm']:.3f}"]
    if fp16:
        parts.append(f"scale {row['loss_scale']:g} (skipped {row['skipped_steps']})")
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts.append(f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else f"{row['tflops_per_device']:.2f} TFLOP/s")
    parts += [f"{row['memory_bytes'] / 2**30:.1f} GiB", f"ETA {format_duration(row['eta_seconds'])}"]
    while columns is not None and len("  ".join(parts)) > columns and len(parts) > 2:
        parts.pop()
    return "  ".join(parts)


def perplexity(loss: float) -> float:
    """Return e^loss: infinity if that is too large for a float, NaN for NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluation_line(row: dict[str, Any]) -> str:
    """Format an evaluation row as a line of text."""
    note = f"  (mean of {row['mean_of_sets']} sets)" if "mean_of_sets" in row else ""
    return (f"step {row['step']:>7}  {row['split']} loss {row['eval_loss']:.4f}  perplexity {row['eval_ppl']:.2f}"
            f"{note}")
