"""The table of GPUs."""

from pretrain.memory.hardware import GPUS, make_cluster


def test_every_gpu_has_a_peak_rate_and_a_memory_budget() -> None:
    for name in GPUS:
        cluster = make_cluster(gpu=name, world_size=16, nodes=None, gpus_per_node=8)
        assert cluster.peak_flops("bf16") > cluster.peak_flops("fp32") > 1e12
        assert 0 < cluster.device_budget_bytes < cluster.gpu.memory_bytes
