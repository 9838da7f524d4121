"""Learning rates of the JSON's schedulers as formulas."""

import itertools
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from pretrain.config.json_rates import json_schedule

PEAK = 2e-4
WARMUP = {"warmup_num_steps": (1, 2, 7, 50), "warmup_type": ("log", "linear", None)}
TOTAL = (8, 60)
GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "WarmupLR": {**WARMUP, "warmup_min_lr": (0, 1e-5), "warmup_max_lr": (None, 3e-4)},
    "WarmupDecayLR": {**WARMUP, "warmup_min_lr": (0, 1e-5), "warmup_max_lr": (None, 3e-4), "total_num_steps": TOTAL},
    "WarmupCosineLR": {**WARMUP, "total_num_steps": TOTAL, "warmup_min_ratio": (None, 0.1),
                       "cos_min_ratio": (None, 0.2)},
    "OneCycle": {"cycle_min_lr": (1e-5,), "cycle_max_lr": (1e-3,), "cycle_first_step_size": (5, 13),
                 "cycle_second_step_size": (None, 9), "decay_lr_rate": (0.0, 0.5), "decay_step_size": (0, 4),
                 "cycle_first_stair_count": (0, 3), "cycle_second_stair_count": (None, 2)},
    "LRRangeTest": {"lr_range_test_min_lr": (1e-4,), "lr_range_test_step_size": (3, 7),
                    "lr_range_test_step_rate": (1.0, 0.3), "lr_range_test_staircase": (True, False)},
}


def deepspeed_rates(kind: str, params: dict[str, Any], count: int) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, got = getattr(lr_schedules, kind)(optimizer, **params), []
    for _ in range(count):
        got.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return got


@pytest.mark.parametrize("kind", GRID)
def test_the_formulas_equal_deepspeeds_classes(kind: str) -> None:
    for values in itertools.product(*GRID[kind].values()):
        params = {name: value for name, value in zip(GRID[kind], values, strict=True) if value is not None}
        rate = json_schedule(kind, params, optimizer_rate=PEAK)
        assert [rate(done) for done in range(80)] == pytest.approx(
            deepspeed_rates(kind, params, 80), rel=1e-9, abs=1e-18), params
