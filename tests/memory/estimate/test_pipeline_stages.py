"""Division of layers into pipeline stages: every stage has blocks, and the head counts."""


from pretrain.config.layout import Layout
from pretrain.memory.estimate.rank_parameters import pipeline_stage_layers
from pretrain.model.config import load_model_config
from pretrain.model.description import ModelConfig


def blocks_of_stages(shape: ModelConfig, layout: Layout) -> list[int]:
    """Return the number of transformer blocks on each pipeline stage."""
    return [sum(layer.kind == "block" for layer in pipeline_stage_layers(shape, layout, stage))
            for stage in range(layout.pipeline_stages)]


def test_the_default_method_divides_by_flops() -> None:
    """The head needs as many FLOPs as 2.3 blocks. So the first pipeline stage gets 5 of the 8 blocks."""
    config = load_model_config("gpt2", "n_layer=8,n_embd=512,n_head=8,vocab_size=16384,n_positions=512")
    assert blocks_of_stages(config, Layout(pipeline_stages=2, world_size=2, seq_length=512)) == [5, 3]


def test_every_stage_has_a_block_even_with_a_large_head() -> None:
    for vocab_size in (256, 50_000, 1_000_000):
        for layers in range(2, 14):
            shape = load_model_config("tiny", f"vocab_size={vocab_size},n_layer={layers},n_embd=64")
            for stages in range(2, layers + 1):
                blocks = blocks_of_stages(shape, Layout(pipeline_stages=stages, world_size=stages, seq_length=128))
                assert min(blocks) >= 1, (vocab_size, layers, stages, blocks)
                assert max(blocks[:-1]) - min(blocks[:-1]) <= 1
