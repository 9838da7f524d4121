"""The estimated memory of a rank, compared with the ZeRO paper, and properties of the estimate for every model.

tests/extensions compare the estimate with real engines of every layout.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.estimate_memory import estimate_memory, estimate_rank
from pretrain.memory.estimate.rank import Rank, pipeline_stage_layers
from pretrain.model.config import load_model_config
from pretrain.model.description import ModelConfig
from tests.support.model_shapes import write_config
from tests.support.rejection import rejection

# ZeRO (arXiv 1910.02054), table 1: data-parallel ranks -> GB of a device at ZeRO stages 1, 2 and 3, for 7.5e9, 128e9
# and 1e12 parameters. Digits as printed: the paper truncates numbers without decimals and rounds the others.
PAPER = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}


def in_papers_format(gigabytes: float, printed: str) -> str:
    """Format a number with as many digits as `printed` has."""
    if "." not in printed:
        return str(int(gigabytes + 1e-9))
    digits = len(printed.split(".")[1])
    return f"{gigabytes + 1e-9:.{digits}f}"


@pytest.mark.parametrize("ranks", PAPER)
def test_estimates_equal_the_table_of_the_zero_paper(ranks: int) -> None:
    for parameters, row in zip((7.5e9, 128e9, 1e12), PAPER[ranks], strict=True):
        for zero_stage, printed in zip((1, 2, 3), row.split(), strict=True):
            found = estimate_memory(None, Layout(world_size=ranks, zero_stage=zero_stage), num_parameters=parameters)
            assert in_papers_format(found.device_bytes / 1e9, printed) == printed, (ranks, parameters, zero_stage)
    assert estimate_memory(None, Layout(world_size=ranks), num_parameters=7.5e9).device_bytes == 120e9


def test_offloaded_states_change_their_location() -> None:
    model, layout = load_model_config("gpt2"), Layout(world_size=4, zero_stage=3)
    on_device = estimate_memory(model, layout).steady
    on_cpu = estimate_memory(model, replace(layout, offload_optimizer="cpu", offload_optimizer_pinned=False)).steady
    on_nvme = estimate_memory(model, replace(layout, offload_optimizer="nvme", offload_param="nvme")).steady
    assert on_cpu.total("optimizer_states", "host") == on_device.total("optimizer_states", "device")
    assert on_cpu.total(location="pinned") == 0
    assert on_nvme.total("optimizer_states", "nvme") > 0.99 * on_device.total("optimizer_states", "device")
    assert on_nvme.total("optimizer_states", "device") == 0


def test_pinned_memory_has_a_margin() -> None:
    """torch rounds each pinned tensor up to a power of two. So the margin is smaller than the tensors."""
    layout = Layout(world_size=4, zero_stage=3, offload_optimizer="cpu")
    pinned = estimate_memory(load_model_config("gpt2"), layout).peak
    assert 0 < pinned.total("margin", "pinned") < pinned.total(location="pinned") / 2


def test_the_estimate_is_for_the_rank_that_needs_most_memory() -> None:
    model = load_model_config("gpt2")
    layout = Layout(world_size=8, zero_stage=1, pipeline_stages=4, gradient_accumulation_steps=8, seq_length=256)
    stages = [estimate_rank(Rank(model, layout, stage)) for stage in range(4)]
    assert estimate_memory(model, layout).device_bytes == max(stage.device_bytes for stage in stages)
    assert sum(len(pipeline_stage_layers(model, layout, stage)) for stage in range(4)) == len(model.layers())
    zero2 = replace(layout, zero_stage=2, pipeline_stages=1, device_kind="cpu")
    ranks = [estimate_rank(Rank(model, zero2, zero_rank=rank)).steady.total() for rank in range(8)]
    assert estimate_memory(model, zero2).steady.total() == max(ranks)


def test_expert_parallelism_divides_the_experts(tmp_path: Path) -> None:
    model = load_model_config(write_config(tmp_path, {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 1024,
                                               "num_hidden_layers": 4, "num_attention_heads": 16,
                                               "intermediate_size": 3584}))
    layout = Layout(world_size=8, zero_stage=1)
    complete = estimate_memory(model, layout).steady.total("parameters")
    divided = estimate_memory(model, replace(layout, expert_parallel_size=8)).steady.total("parameters")
    experts = 4 * 8 * 3 * 1024 * 3584 * 2  # layers, experts, matrices; bytes
    assert complete - divided == pytest.approx(experts * 7 / 8, rel=1e-3)


@pytest.mark.parametrize(("layout", "message"), [
    (Layout(world_size=6, pipeline_stages=4), "multiple of 4"), (Layout(world_size=0), "world_size"),
    (Layout(precision="int8"), "precision"), (Layout(world_size=8, expert_parallel_size=3), "divisor"),
    (Layout(world_size=64, pipeline_stages=64), "at least one layer"),
    (Layout(partition_method="profile", pipeline_stages=2, world_size=2), "partition_method"),
    (Layout(seq_length=4096), "seq_length"),
])
def test_impossible_layouts_are_rejected_in_one_line(layout: Layout, message: str) -> None:
    assert message in rejection(estimate_memory, load_model_config("gpt2"), layout)


def test_an_estimate_needs_a_model_or_its_size() -> None:
    with pytest.raises(ConfigError, match="--num_parameters"):
        estimate_memory(None, Layout())


def blocks_of_stages(model: ModelConfig, layout: Layout) -> list[int]:
    """Return the number of transformer blocks on each pipeline stage."""
    return [sum(layer.kind == "block" for layer in pipeline_stage_layers(model, layout, stage))
            for stage in range(layout.pipeline_stages)]


def test_the_default_method_divides_by_flops() -> None:
    """The head needs as many FLOPs as 2.3 blocks. So the first pipeline stage gets 5 of the 8 blocks."""
    config = load_model_config("gpt2", "n_layer=8,n_embd=512,n_head=8,vocab_size=16384,n_positions=512")
    assert blocks_of_stages(config, Layout(pipeline_stages=2, world_size=2, seq_length=512)) == [5, 3]


def test_every_stage_has_a_block_even_with_a_large_head() -> None:
    for vocab_size in (256, 50_000, 1_000_000):
        for layers in range(2, 14):
            model = load_model_config("tiny", f"vocab_size={vocab_size},n_layer={layers},n_embd=64")
            for stages in range(2, layers + 1):
                blocks = blocks_of_stages(model, Layout(pipeline_stages=stages, world_size=stages, seq_length=128))
                assert min(blocks) >= 1, (vocab_size, layers, stages, blocks)
                assert max(blocks[:-1]) - min(blocks[:-1]) <= 1
