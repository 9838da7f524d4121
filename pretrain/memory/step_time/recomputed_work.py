"""FLOPs that recomputation adds to a step."""

from pretrain.config.layout import Layout
from pretrain.model.description import ModelConfig
from pretrain.model.flops import keys_per_query, layer_flops_per_token


def recomputed_fraction(layout: Layout, shape: ModelConfig | None) -> float:
    """Return the recomputed FLOPs as a fraction of the blocks' forward pass; without a shape, all or nothing.

    The recomputation of attention ends before its output projection, whose output the backward pass does not need,
    unless a norm follows. (Korthikanti et al., arXiv 2205.05198, recompute only the core of attention. The kernels do
    that in their own backward pass, so it is not counted here.)
    """
    recompute, tiled = layout.recomputation, layout.mlp_tiles > 1
    if shape is None or not (recompute.is_on or tiled) or (recompute.interval and not tiled):
        return float(recompute.is_on)
    recomputed = total = 0.0
    for index, layer in enumerate(shape.blocks()):
        work = layer_flops_per_token(shape, layer, layout.seq_length)
        attention = _attention_work(shape, layer.window, layout.seq_length)
        output = 0 if shape.post_norm else 6 * shape.num_heads * shape.head_size * shape.hidden_size
        by_part = {"none": 0.0, "blocks": work, "attention": attention - output, "mlp": work - attention}
        recomputed += by_part["blocks" if recompute.interval else recompute.part_of(index)]
        recomputed += by_part["mlp"] if tiled else 0  # also after the recomputation of complete blocks
        total += work
    return recomputed / total


def _attention_work(shape: ModelConfig, window: int, seq_length: int) -> float:
    """Return the part of `layer_flops_per_token` in attention: its matrices and its scores."""
    query, keys = shape.num_heads * shape.head_size, 2 * shape.num_kv_heads * shape.head_size
    return 6 * shape.hidden_size * (2 * query + keys) + 12 * query * keys_per_query(window, seq_length)
