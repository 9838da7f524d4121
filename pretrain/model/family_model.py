"""The implementation of the models of families/: this project's layers (layers/), and formulas for their memory.

Imports no torch; methods that need it import it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrain.model.attention_memory import shared_mask_bytes
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.family_layers import family_layers
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
