"""FLOPs of a model's layers, forward and backward: what MFU counts, and what pipelines are cut by."""

from pretrain.model.config import ModelConfig


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Forward and backward FLOPs a token, recomputation not counted: 6 N + 12 layers * hidden * T.

    N is the parameters that a token is multiplied with (no embedding look-ups; the head once, tied or not).
    Formula: PaLM (arXiv 2204.02311), appendix B, with attention over the whole sequence, as others count it.
    """
    return config.num_layers * block_flops_per_token(config, seq_length) + head_flops_per_token(config)


def block_flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Of flops_per_token, those of one block: its parameters and its attention."""
    return 6.0 * config.layer_parameters() + 12.0 * config.num_heads * config.head_size * seq_length


def head_flops_per_token(config: ModelConfig) -> float:
    """Of flops_per_token, those of the output layer, tied or not."""
    return 6.0 * config.vocab_size * config.hidden_size


def head_to_cut_by(head: int, blocks: int, num_layers: int, num_stages: int) -> int:
    """The head's work as pipelines are cut by it: so little that the last stage gets a block too, as every stage must.

    With the head as (L - p) / (p - 1) blocks, the p stages have equal shares when the last one has a single block.

    Args:
        blocks: work of all L blocks together, in the unit of `head`.
    """
    return min(head, blocks * max(num_layers - num_stages, 0) // (num_layers * (num_stages - 1)))
