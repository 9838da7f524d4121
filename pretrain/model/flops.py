"""FLOPs of a model's layers, forward and backward: for MFU, and for partitioning pipelines by work."""

from functools import lru_cache

from pretrain.model.description import Layer, ModelConfig


@lru_cache(maxsize=64)
def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Return the forward and backward FLOPs of a token: 6 N + 12 layers * hidden * T. Recomputation is not counted.

    N counts the parameters of the blocks and of the output layer, tied or not; of the experts, only those that process
    the token. Embedding look-ups are not counted.
    Formula: PaLM (arXiv 2204.02311), appendix B, with attention over the full sequence, or over the window of a layer.
    With --document_attention it is the same, so that the FLOPs of a step do not depend on its documents.
    """
    return float(sum(layer_flops_per_token(config, layer, seq_length) for layer in config.layers()))


def exact_flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Return the forward and backward FLOPs of a token in the matrix products that training needs, mean over a sample.

    Unlike `flops_per_token`, it counts the causal half of the attention, and no biases and norms: 6 times the elements
    of each block's matrices, 6 V D for the output layer, tied or not, and 12 * heads * head size for each key that a
    query sees. Recomputation is not counted. With --document_attention the documents are not regarded: the number is
    then an upper limit.
    """
    blocks = config.blocks()
    matrices = sum(each.active_size for layer in blocks for each in layer.parameters if each.is_matrix)
    keys = sum(mean_keys_seen(layer.window, seq_length) for layer in blocks)
    return 6.0 * matrices + 12.0 * config.num_heads * config.head_size * keys + \
        6.0 * config.vocab_size * config.hidden_size


def mean_keys_seen(window: int, seq_length: int) -> float:
    """Return the mean number of keys that the queries of a sample see: query i of a layer sees min(i, window) keys."""
    full = keys_per_query(window, seq_length)
    return full - full * (full - 1) / 2 / seq_length


def keys_per_query(window: int, seq_length: int) -> int:
    """Return the number of keys that a query is counted with: T, or the layer's window if that is shorter."""
    return min(window or seq_length, seq_length)


def layer_flops_per_token(config: ModelConfig, layer: Layer, seq_length: int) -> int:
    """Return the part of flops_per_token in a layer; 0 for embeddings, and norms outside of blocks."""
    if layer.kind == "head":
        return 6 * config.vocab_size * config.hidden_size
    if layer.kind != "block":
        return 0
    keys = keys_per_query(layer.window, seq_length)
    return 6 * layer.active_size + 12 * config.num_heads * config.head_size * keys


def head_work_for_partition(head: int, blocks: int, num_layers: int, num_stages: int) -> int:
    """Return the head's work, limited so that the last pipeline stage gets at least one block.

    The limit is the work of (L - p) / (p - 1) blocks: then all p pipeline stages have equal work, and the last one
    consists of one block and the head.

    Args:
        head: work of the head, in any unit.
        blocks: work of all L blocks together, in the same unit.
    """
    return min(head, blocks * max(num_layers - num_stages, 0) // (num_layers * (num_stages - 1)))
