"""Division of layers into pipeline stages, compared with DeepSpeed's own functions and the model's FLOPs."""

import torch
from deepspeed.runtime import utils as ds_utils

from pretrain.config.layout import Layout
from pretrain.memory.estimate.model_shape import ModelShape, shape_of
from pretrain.memory.estimate.pipeline_stages import (
    layer_work,
    partition_balanced,
    partition_uniform,
    pipeline_stage_layers,
)
from pretrain.model.config import load_model_config, preset_names
from pretrain.model.flops import flops_per_token


def blocks_of_stages(shape: ModelShape, layout: Layout) -> list[int]:
    """Return the number of transformer blocks on each pipeline stage."""
    return [sum(layer.kind == "block" for layer in pipeline_stage_layers(shape, layout, stage))
            for stage in range(layout.pipeline_stages)]


def test_partitions_equal_those_of_deepspeed() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        items, parts = (int(torch.randint(1, 20, (), generator=generator)) for _ in range(2))
        weights = [[0, 1, 5, 5, 100][int(index)] for index in torch.randint(0, 5, (items,), generator=generator)]
        balanced = [int(cut) for cut in ds_utils.partition_balanced(weights, parts)]
        assert partition_balanced(tuple(weights), parts) == balanced
        assert partition_uniform(items, parts) == [int(cut) for cut in ds_utils.partition_uniform(items, parts)]


def test_work_of_layers_sums_to_the_models_flops() -> None:
    for name in preset_names():
        config = load_model_config(name)
        shape = shape_of(config)
        for length in (1024, 16384):  # some presets have a window of 4096
            work = sum(layer_work(shape, layer, length) for layer in shape.layers())
            assert 6 * work == flops_per_token(config, length), (name, length)


def test_the_default_method_divides_by_flops() -> None:
    """The head needs as many FLOPs as 2.3 blocks. So the first pipeline stage gets 5 of the 8 blocks."""
    config = load_model_config("gpt2", "n_layer=8,n_embd=512,n_head=8,vocab_size=16384,n_positions=512")
    assert blocks_of_stages(shape_of(config), Layout(pipeline_stages=2, world_size=2, seq_length=512)) == [5, 3]


def test_every_stage_has_a_block_even_with_a_large_head() -> None:
    for vocab_size in (256, 50_000, 1_000_000):
        for layers in range(2, 14):
            shape = shape_of(load_model_config("tiny", f"vocab_size={vocab_size},n_layer={layers},n_embd=64"))
            for stages in range(2, layers + 1):
                blocks = blocks_of_stages(shape, Layout(pipeline_stages=stages, world_size=stages, seq_length=128))
                assert min(blocks) >= 1, (vocab_size, layers, stages, blocks)
                assert max(blocks[:-1]) - min(blocks[:-1]) <= 1
