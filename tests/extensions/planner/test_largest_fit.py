"""Search for the largest model, sequence length or micro-batch that fits."""

from dataclasses import replace

import pytest

from pretrain.config.layout import Layout
from pretrain.extensions.planner.largest_fit import bisect, find_largest, scaled_model
from pretrain.memory.compare.candidates import generate_candidates
from pretrain.memory.compare.combinations import Axes
from pretrain.memory.compare.compare import Workload, memory_shortage
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.hardware import make_cluster
from pretrain.model.config import load_model_config


@pytest.mark.parametrize("target", ["max_model", "max_seq", "max_micro_batch"])
def test_the_result_fits_and_the_next_size_does_not(target: str) -> None:
    model = load_model_config("gpt3-1.3b")
    cluster = make_cluster(gpu="a100-40", world_size=8, nodes=None, gpus_per_node=None)
    workload = Workload(cluster, model.num_parameters(), model, "gpt3-1.3b")
    axes = Axes(zero_stages=(1, 3), offloads=("none", "all_cpu"), pipeline_stages=(1, 2), micro_batch_sizes=(1,))
    found = find_largest(target, generate_candidates(axes, cluster, model).candidates, workload)
    assert len(found) >= 6
    for largest in found:
        assert largest.value > 0
        assert not largest.reached_end
        assert " of " in largest.detail  # names the memory that the next size exceeds
        if target == "max_micro_batch":
            for size, fits in ((largest.value, True), (largest.value + 1, False)):
                layout = replace(largest.candidate.layout, micro_batch_size=size)
                assert (memory_shortage(estimate_memory(model, layout), cluster) == "") == fits
    values = {largest.candidate.name: largest.value for largest in found}
    assert values["zero3_checkpoint"] > values["zero1"]


def test_bisect_finds_every_limit() -> None:
    for most in (1, 2, 7, 8, 100):
        for limit in range(most + 1):
            assert bisect(lambda step, limit=limit: step <= limit, most) == limit  # type: ignore[misc]


def test_scaled_models_keep_their_proportions() -> None:
    model = load_model_config("llama3-8b")
    scaled = scaled_model(model, 16, Layout())  # 16 groups of four heads; llama3-8b has 8
    assert (scaled.num_heads, scaled.num_kv_heads, scaled.hidden_size, scaled.num_layers) == (64, 16, 8192, 64)
    assert 7 < scaled.num_parameters() / model.num_parameters() < 8.5
