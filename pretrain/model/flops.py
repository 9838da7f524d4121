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
