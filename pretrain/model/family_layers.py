"""The layers of a model of families/, and their parameters. Imports no torch.

A new kind of block: its choice is a field of ModelConfig, its parameters stand in `_block_parameters`, layers/ computes
it, and layer_memory.py says what it keeps.
"""

from collections.abc import Iterator
from functools import lru_cache

from pretrain.model.description import Layer, ModelConfig, Parameter


@lru_cache(maxsize=256)
def family_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """List the layers: embedding, its norm and learned positions if any, blocks, final norm, head."""
    tied, vocabulary = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
    embedding = Parameter("embedding", vocabulary, 0, vocabulary[:1])
    layers = [Layer("embedding", "TokenEmbedding", (embedding,), tied)]
    if config.embedding_norm:  # a layer of its own, because all stages of a pipeline build the tied embedding
        layers.append(Layer("norm", "EmbeddingNorm", tuple(_norm(config, "norm"))))
    if config.position == "learned":
        positions = Parameter("embedding", (config.max_positions, config.hidden_size))
        layers.append(Layer("positions", "PositionEmbedding", (positions,)))
    kinds = [(config.window(index), config.has_experts(index)) for index in range(config.num_layers)]
    blocks = {(window, experts): Layer("block", "Block", tuple(_block_parameters(config, experts)), window=window,
                                       has_experts=experts) for window, experts in dict.fromkeys(kinds)}
    layers += [blocks[kind] for kind in kinds]
    layers.append(Layer("norm", "FinalNorm", tuple(_norm(config, "norm"))))
    if tied:
        return (*layers, Layer("head", "TokenEmbedding", (embedding,), tied))
    head = tuple(_column_parallel("lm_head", config.hidden_size, vocabulary[:1], bias=config.head_bias))
    return (*layers, Layer("head", "LossHead", head))


def _block_parameters(config: ModelConfig, has_experts: bool) -> Iterator[Parameter]:
    """Yield the parameters of a block. layers/block.py has the norms, attention and MLP whose parameters are here."""
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    query, key = heads * config.head_size, kv_heads * config.head_size
    if config.pre_norm:
        yield from _norm(config, "norm1")
    yield from _column_parallel("attention.qkv", hidden, (query, key, key), bias=config.qkv_bias)
    if config.qk_norm:
        over_all_heads = config.qk_norm == "all"
        for name, size in (("q_norm", query), ("k_norm", key)):
            yield from _norm(config, f"attention.{name}", size if over_all_heads else config.head_size,
                             is_split=over_all_heads)
    yield from _row_parallel("attention.out", query, hidden, bias=config.attention_out_bias)
    if config.post_norm:
        yield from _norm(config, "post_norm1")
    if config.pre_norm and not config.shared_norm:
        yield from _norm(config, "norm2")
    yield from _experts(config) if has_experts else _mlp(config, "mlp", config.intermediate_size)
    if config.post_norm:
        yield from _norm(config, "post_norm2")


def _norm(config: ModelConfig, name: str, size: int = 0, *, is_split: bool = False) -> Iterator[Parameter]:
    """Yield the parameters of a norm over `size` elements; 0: over hidden_size. `is_split`: ranks divide them."""
    size = size or config.hidden_size
    split: tuple[int | None, tuple[int, ...]] = (0, (size,)) if is_split else (None, ())
    yield Parameter(f"{name}.weight", (size,), *split)
    if config.norm == "layernorm" and config.norm_bias:
        yield Parameter(f"{name}.bias", (size,), *split)


def _column_parallel(name: str, inputs: int, segments: tuple[int, ...], *, bias: bool) -> Iterator[Parameter]:
    """Yield the parameters of a linear layer of which each rank computes a range of each segment of the outputs."""
    outputs = sum(segments)
    yield Parameter(f"{name}.weight", (outputs, inputs), 0, segments)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), 0, segments)


def _row_parallel(name: str, inputs: int, outputs: int, *, bias: bool) -> Iterator[Parameter]:
    """Yield the parameters of a linear layer of which each rank has a range of the inputs; all ranks have the bias."""
    yield Parameter(f"{name}.weight", (outputs, inputs), 1, (inputs,))
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


def _mlp(config: ModelConfig, name: str, inner: int) -> Iterator[Parameter]:
    for part in ("gate", "up") if config.gated_mlp else ("up",):
        yield from _column_parallel(f"{name}.{part}", config.hidden_size, (inner,), bias=config.mlp_bias)
    yield from _row_parallel(f"{name}.down", inner, config.hidden_size, bias=config.mlp_bias)


def _experts(config: ModelConfig) -> Iterator[Parameter]:
    """Yield the parameters of a router, of the experts [experts, outputs, inputs], and of the shared expert."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    yield Parameter("mlp.router.weight", (count, hidden))
    for part, outputs, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield Parameter(f"mlp.experts.{part}", (count, outputs, inputs), experts_per_token=config.experts_per_token)
    if config.shared_expert_size:
        yield from _mlp(config, "mlp.shared_expert", config.shared_expert_size)
        if config.shared_expert_gate:
            yield Parameter("mlp.shared_expert_gate.weight", (1, hidden))
