"""Division of layers into pipeline stages, compared with the model's FLOPs and the engine's division."""

from dataclasses import replace

from pretrain.config.layout import Layout
from pretrain.memory.estimate.model_shape import ModelShape, shape_of
from pretrain.memory.estimate.pipeline_stages import layer_costs_of_shape, layer_work, pipeline_stage_layers
from pretrain.model.config import load_model_config, preset_names
from pretrain.model.flops import flops_per_token
from pretrain.model.partition import layer_costs


def blocks_of_stages(shape: ModelShape, layout: Layout) -> list[int]:
    """Return the number of transformer blocks on each pipeline stage."""
    return [sum(layer.kind == "block" for layer in pipeline_stage_layers(shape, layout, stage))
            for stage in range(layout.pipeline_stages)]


def test_work_of_layers_sums_to_the_models_flops() -> None:
    for name in preset_names():
        config = load_model_config(name)
        shape = shape_of(config)
        for length in (1024, 16384):  # some presets have a window of 4096
            work = sum(layer_work(shape, layer, length) for layer in shape.layers())
            assert 6 * work == flops_per_token(config, length), (name, length)


def test_estimate_and_engine_count_the_same_costs() -> None:
    """The engine divides by `layer_costs`, the estimate by `layer_costs_of_shape`, in the unit of `layer_work`."""
    for name in preset_names():
        config = load_model_config(name)
        of_shape = layer_costs_of_shape(shape_of(config), 1024)
        assert layer_costs(config, 1024) == tuple(replace(layer, work=6 * layer.work) for layer in of_shape), name


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
