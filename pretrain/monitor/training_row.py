"""The row of metrics.jsonl for a logged step; tools/metrics.md defines its keys."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed import DeepSpeedEngine

from pretrain.config.validate import Plan
from pretrain.distributed.process import resident_bytes
from pretrain.engine.phases import BACKWARD, FORWARD, OPTIMIZER, REDUCE, overlaps_reduction
from pretrain.engine.recipe import recipe_values, router_values
from pretrain.engine.steps import grad_norm, loss_scale
from pretrain.model.flops import exact_flops_per_token, flops_per_token
from pretrain.monitor.all_ranks import AllRanks
from pretrain.monitor.device_values import device_peak_tflops, memory_bytes


@dataclass(frozen=True)
class Interval:
    """The steps since the last row."""

    step: int  # the last of them
    steps: int
    step_seconds: float  # mean, without saves and evaluations
    consumed_samples: int  # after the last of them
    samples: int  # that they consumed
    batch_size: int  # samples of the last of them
    save_seconds: float
    eval_seconds: float


def training_row(plan: Plan, engine: DeepSpeedEngine, interval: Interval, ranks: AllRanks, *, loss: float, lr: float,
                 gradients: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the row. `gradients`: result of GradientStats.take."""
    length = plan.seq_lengths.at(interval.consumed_samples - interval.batch_size)
    return {
        "step": interval.step, "time": time.time(), "consumed_samples": interval.consumed_samples,
        "consumed_tokens": interval.consumed_samples * plan.args.seq_length, "seq_length": length,
        "global_batch_size": interval.batch_size, "loss": loss, "loss_max": ranks.loss_max, "lr": lr,
        "grad_norm": grad_norm(engine), **gradients,
        "param_norm": ranks.param_norm, "update_ratio": ranks.update_ratio,
        "loss_scale": loss_scale(engine), "skipped_steps": engine.skipped_steps,
        **_times(engine, interval, ranks, plan.layout.pipeline_stages), **_rates(plan, interval, length), **_memory(),
        "power_watts": ranks.power_watts,
        "eta_seconds": _eta_seconds(plan, interval), **recipe_values(engine),
        **router_values(engine, plan.model.num_layers),
    }


def _eta_seconds(plan: Plan, interval: Interval) -> float:
    """Return the time of the remaining steps at the speed of this interval, in samples: their batches may be larger."""
    remaining = plan.length.samples_between(interval.step, plan.train_steps, position=interval.consumed_samples)
    return remaining * interval.steps * interval.step_seconds / max(interval.samples, 1)


def _times(engine: DeepSpeedEngine, interval: Interval, ranks: AllRanks,
           pipeline_stages: int) -> dict[str, float | None]:
    return {
        "step_time_ms": interval.step_seconds * 1e3, "data_time_ms": ranks.data_seconds * 1e3,
        "forward_time_ms": ranks.phase_ms[FORWARD], "backward_time_ms": ranks.phase_ms[BACKWARD],
        "reduce_time_ms": None if overlaps_reduction(engine) else ranks.phase_ms[REDUCE],
        "optimizer_time_ms": ranks.phase_ms[OPTIMIZER],
        "save_time_ms": interval.save_seconds * 1e3, "eval_time_ms": interval.eval_seconds * 1e3,
        "pipeline_bubble": ranks.pipeline_bubble if pipeline_stages > 1 else None,
    }


def _rates(plan: Plan, interval: Interval, length: int) -> dict[str, float | None]:
    tokens_per_second = interval.samples * plan.args.seq_length / interval.steps / interval.step_seconds
    per_device = tokens_per_second / plan.layout.world_size / 1e12
    tflops, exact = (per_device * count(plan.model, length) for count in (flops_per_token, exact_flops_per_token))
    peak = device_peak_tflops(plan)
    return {"tokens_per_second": tokens_per_second, "tflops_per_device": tflops, "mfu": tflops / peak if peak else None,
            "tflops_exact_per_device": exact, "mfu_exact": exact / peak if peak else None}


def _memory() -> dict[str, int]:
    now_bytes, peak_bytes = memory_bytes()
    return {"memory_bytes": now_bytes, "peak_memory_bytes": peak_bytes, "host_memory_bytes": resident_bytes()[0]}
