"""The models of families/: their layers with the parameters, which layers/ computes, and formulas for their memory.

Imports no torch; methods that need it import it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pretrain.model.attention_memory import shared_mask_bytes
from pretrain.model.description import Layer, ModelConfig, Parameter
from pretrain.model.hf_names import (
    HEAD,
    TensorRule,
    family_name_in_module,
    family_rules,
    name_in_files,
    names_in_model,
)
from pretrain.model.implementation import FromFiles, LayerBytes, Shape, ToFiles
from pretrain.model.init_methods import Initialization, initial_std
from pretrain.model.layer_memory import block_backward, layer_saved, loss_backward, loss_peak, saved_input_bytes
from pretrain.model.operator_memory import MicroBatch

if TYPE_CHECKING:
    import torch
    from deepspeed.pipe import LayerSpec
    from torch import nn

    from pretrain.config.layout_rules import Rule
    from pretrain.config.plan import Plan


@dataclass(frozen=True)
class FamilyModel:
    """Implements model/implementation.py for all families: what distinguishes them is data."""

    trains_padding_row = True

    def layers(self, config: ModelConfig) -> tuple[Layer, ...]:
        return family_layers(config)

    def settings(self, config: ModelConfig) -> Mapping[str, Any]:
        return {}

    def tensor_rules(self, config: ModelConfig) -> list[TensorRule]:
        return family_rules(config)

    def head_name(self, config: ModelConfig) -> str:
        return HEAD

    def name_in_module(self, config: ModelConfig, name: str) -> str:
        return family_name_in_module(name, config)

    def from_files(self, config: ModelConfig, shapes: Mapping[str, Shape]) -> Iterator[FromFiles]:
        return (FromFiles((name,), {full: shapes[name]}) for name, full in names_in_model(shapes, config).items())

    def to_files(self, config: ModelConfig, dtype: str) -> Iterator[ToFiles]:
        return (ToFiles({name_in_files(name, config): (dtype, shape) for name, shape in
                         zip(rule.theirs, rule.their_shapes(), strict=True)}, rule) for rule in family_rules(config))

    def rules(self, plan: "Plan") -> "tuple[Rule, ...]":
        return ()

    def notes(self, plan: "Plan") -> list[str]:
        return []

    def has_dropout(self, config: ModelConfig) -> bool:
        return max(config.embedding_dropout, config.attention_dropout, config.residual_dropout) > 0

    def output_std(self, config: ModelConfig, how: Initialization) -> float | None:
        name = "tied_modules.embed.embedding" if config.tie_word_embeddings else HEAD
        return initial_std(name, (config.vocab_size, config.hidden_size), config, how)

    def prove(self, config: ModelConfig, precision: str, announce: Callable[[str], None] | None = None) -> str:
        return ""

    def layer_bytes(self, config: ModelConfig, layer: Layer, batch: MicroBatch, part: str) -> LayerBytes:
        saved = layer_saved(config, layer, batch, part)
        if layer.kind == "head":
            return LayerBytes(saved, 0, loss_peak(config, batch), loss_backward(config, batch))
        if layer.kind == "norm":
            return LayerBytes(saved)
        backward = 0
        if layer.kind == "block":
            backward = block_backward(config, batch, layer.window, part, experts=layer.has_experts)
        return LayerBytes(saved, saved_input_bytes(config, layer, batch), 0, backward)

    def shared_bytes(self, config: ModelConfig, batch: MicroBatch) -> int:
        return shared_mask_bytes(config, batch)

    def specs(self, config: ModelConfig, **settings: Any) -> "list[LayerSpec]":
        from pretrain.model.layer_specs import family_specs

        return family_specs(config, **settings)

    def initialize(self, module: "nn.Module", config: ModelConfig, *, seed: int, how: Initialization) -> None:
        from pretrain.model.init import initialize_family

        initialize_family(module, config, seed=seed, how=how)

    def initial_buffers(self, config: ModelConfig) -> "Mapping[str, torch.Tensor]":
        return {}

    def attention_name(self, config: ModelConfig) -> str:
        return ""


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
