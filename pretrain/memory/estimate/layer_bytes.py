"""Memory of a layer for one micro-batch: of our layers by formulas, of transformers' layers measured."""

from dataclasses import dataclass
from functools import lru_cache

from pretrain.model.attention_memory import shared_mask_bytes
from pretrain.model.description import Layer, ModelConfig
from pretrain.model.layer_memory import block_backward, layer_saved, loss_backward, loss_peak, saved_input_bytes
from pretrain.model.operator_memory import MicroBatch


@dataclass(frozen=True)
class LayerBytes:
    """Memory of a layer in bytes, without its output and its parameters."""

    saved: int  # what the forward pass keeps for the backward pass
    saved_input: int = 0  # of it, the layer's input
    forward_peak: int = 0  # of the head's forward pass, with `saved`
    backward: int = 0  # what the backward pass of a block or head allocates at its peak beyond `saved`


@lru_cache(maxsize=4096)  # most blocks of a model are one object, and the phases of a step ask for the same layers
def layer_bytes(config: ModelConfig, layer: Layer, batch: MicroBatch, part: str = "none") -> LayerBytes:
    """Return the memory of a layer. Raises ConfigError if a layer of transformers cannot be measured.

    Args:
        part: the part of a block that is recomputed: "attention" or "mlp".
    """
    if config.described:
        from pretrain.memory.estimate.described_layers import described_bytes  # imports torch

        return described_bytes(config, batch).layers[layer]
    saved = layer_saved(config, layer, batch, part)
    if layer.kind == "head":
        return LayerBytes(saved, 0, loss_peak(config, batch), loss_backward(config, batch))
    if layer.kind == "norm":
        return LayerBytes(saved)
    backward = 0
    if layer.kind == "block":
        backward = block_backward(config, batch, layer.window, part, experts=layer.has_experts)
    return LayerBytes(saved, saved_input_bytes(config, layer, batch), 0, backward)


def shared_bytes(config: ModelConfig, batch: MicroBatch) -> int:
    """Return the bytes of masks and tables that all blocks of a rank share."""
    if config.described:
        from pretrain.memory.estimate.described_layers import described_bytes

        return described_bytes(config, batch).arguments
    return shared_mask_bytes(config, batch)
