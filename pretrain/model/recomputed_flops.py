"""FLOPs that recomputation adds to a step."""

from functools import lru_cache

from pretrain.model.description import ModelConfig
from pretrain.model.flops import flops_per_token, keys_per_query, layer_flops_per_token
from pretrain.model.recompute import Recompute


@lru_cache(maxsize=64)
def recomputed_fraction(config: ModelConfig, recompute: Recompute, seq_length: int) -> float:
    """Return the recomputed FLOPs as a fraction of the blocks' forward pass.

    The recomputation of attention ends before its output projection, whose output the backward pass does not need,
    unless a norm follows. (Korthikanti et al., arXiv 2205.05198, recompute only the core of attention. The kernels do
    that in their own backward pass, so it is not counted here.)
    """
    if not (recompute.is_on or recompute.mlp_tiles > 1) or (recompute.interval and recompute.mlp_tiles == 1):
        return float(recompute.is_on)
    recomputed = total = 0.0
    for index, layer in enumerate(config.blocks()):
        work = layer_flops_per_token(config, layer, seq_length)
        attention = _attention_work(config, layer.window, seq_length)
        output = 0 if config.post_norm else 6 * config.num_heads * config.head_size * config.hidden_size
        by_part = {"none": 0.0, "blocks": work, "attention": attention - output, "mlp": work - attention}
        recomputed += by_part["blocks" if recompute.interval else recompute.part_of(index)]
        if recompute.mlp_tiles > 1:  # also after the recomputation of complete blocks
            recomputed += by_part["mlp"]
        total += work
    return recomputed / total


def _attention_work(config: ModelConfig, window: int, seq_length: int) -> float:
    """Return the part of `layer_flops_per_token` in attention: its matrices and its scores."""
    query, keys = config.num_heads * config.head_size, 2 * config.num_kv_heads * config.head_size
    return 6 * config.hidden_size * (2 * query + keys) + 12 * query * keys_per_query(window, seq_length)


def more_flops(config: ModelConfig, recompute: Recompute, seq_length: int) -> float:
    """Return the recomputed FLOPs of a step as a fraction of its FLOPs without recomputation."""
    blocks = sum(layer_flops_per_token(config, layer, seq_length) for layer in config.blocks())
    forward = blocks / 3  # of the forward pass and a backward pass that takes twice as many
    return recomputed_fraction(config, recompute, seq_length) * forward / flops_per_token(config, seq_length)
