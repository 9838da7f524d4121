"""The layer specs of a model that is built from transformers' modules, for model/layer_specs.py."""

from functools import partial
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec

from pretrain.extensions.wrapped.decoder import Decoder
from pretrain.extensions.wrapped.modules import (
    DecoderLayer,
    Embedding,
    Epilogue,
    LogitsHead,
    Prologue,
    tied_logits_head,
)
from pretrain.model.description import ModelConfig
from pretrain.model.layers.vocabulary import Head, LossHead, TrainingLoss, tied_head, tied_loss_head
from pretrain.model.recompute import Recompute


def wrapped_specs(config: ModelConfig, decoder: Decoder, *, ends_in_loss: bool, loss: TrainingLoss | None,
                  recompute: Recompute) -> list[LayerSpec]:
    """List the specs of the wrapped layers. The arguments are those of layer_specs.build_specs."""
    specs: list[LayerSpec] = []
    for layer in config.layers():
        if layer.kind == "block":
            index = len(specs) - 1 - decoder.parts.changes_embedding
            specs.append(LayerSpec(DecoderLayer, decoder, layer, index, recompute.part_of(index)))
        elif layer.kind == "norm":
            specs.append(LayerSpec({"EmbeddingNorm": Prologue, "FinalNorm": Epilogue}[layer.class_name], decoder,
                                   layer))
        elif layer.tied:
            of_head: Any = tied_loss_head if ends_in_loss else tied_head
            if not decoder.parts.plain_head:
                of_head = partial(tied_logits_head, ends_in_loss=ends_in_loss)
            specs.append(TiedLayerSpec("embed", Embedding, decoder, layer, loss, tied_weight_attr="embedding",
                                       forward_fn=of_head if layer.kind == "head" else None))
        elif layer.kind == "embedding":
            specs.append(LayerSpec(Embedding, decoder, layer, loss))
        elif decoder.parts.plain_head:
            specs.append(LayerSpec(LossHead if ends_in_loss else Head, config, layer, loss))
        else:
            specs.append(LayerSpec(LogitsHead, decoder, layer, loss, ends_in_loss=ends_in_loss))
    return specs
