"""Days, GPU-hours and FLOPs of a complete run."""

import pytest

from pretrain.config.layout import Layout
from pretrain.memory.compare.compare import run_cost


def test_cost_of_gpt3() -> None:
    layout = Layout(world_size=1024, zero_stage=1, precision="fp16")
    cost = run_cost(layout, num_parameters=175 * 10**9, flops_per_token=6 * 175e9, peak_flops=1024 * 312e12, mfu=0.45,
                    nodes=128, tokens=300e9)
    assert cost.flops == pytest.approx(3.15e23)
    assert cost.days == pytest.approx(3.15e23 / (1024 * 312e12 * 0.45) / 86400)
    assert cost.gpu_hours == pytest.approx(cost.days * 24 * 1024)
    assert cost.chinchilla_tokens == 3.5e12
    assert cost.checkpoint_bytes == 175 * 10**9 * (4 + 8 + 2)
    assert Layout(zero_stage=3).checkpoint_bytes(100) == 100 * (4 + 8)
